//! Threads for work that waits for the system: disk I/O without io_uring, and the jobs of servers.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Idle time after which a thread exits.
const IDLE: Duration = Duration::from_secs(10);

/// Work for a thread that may wait.
pub trait Work: Send + 'static {
    /// Does it.
    fn run(self);
}

impl Work for Box<dyn FnOnce() + Send> {
    fn run(self) {
        self();
    }
}

/// Threads that do the work of several queues. Each queue has threads of its own, started on demand and at most so many, so that work
/// that hangs keeps only work of the same queue waiting. Work of a queue is started in the order in which it comes.
///
/// The queues are not bounded: callers bound what they have in flight. Dropping it does not wait; what is queued is still done.
pub struct Workers<K, W> {
    shared: Arc<Shared<K, W>>,
    name: &'static str,
    limit: usize,
}

struct Shared<K, W> {
    state: Mutex<State<K, W>>,
    /// A queue without a thread has work, for the spare thread.
    starved: Condvar,
    /// All work is done, or a thread has exited.
    ended: Condvar,
}

struct State<K, W> {
    queues: BTreeMap<K, Queue<W>>,
    /// Work that is queued or being done.
    pending: usize,
    /// Threads of all queues.
    threads: usize,
    /// Threads started so far, for their names.
    started: usize,
    /// There is a thread that serves queues for which the system gives none.
    spare: bool,
    closing: bool,
}

struct Queue<W> {
    waiting: VecDeque<W>,
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
    /// There is work, or it is closing.
    wanted: Arc<Condvar>,
}

impl<W> Default for Queue<W> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            threads: 0,
            idle: 0,
            wanted: Arc::default(),
        }
    }
}

impl<K: Copy + Ord + Send + 'static, W: Work> Workers<K, W> {
    /// Workers with at most `limit` threads for each queue, at least one; their names begin with `name`. No thread is started.
    pub fn new(name: &'static str, limit: usize) -> Self {
        let state = State {
            queues: BTreeMap::new(),
            pending: 0,
            threads: 0,
            started: 0,
            spare: false,
            closing: false,
        };
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                starved: Condvar::new(),
                ended: Condvar::new(),
            }),
            name,
            limit: limit.max(1),
        }
    }

    /// The same, with a spare thread: work is never refused, even when the system gives no further thread.
    ///
    /// # Errors
    /// When the system gives not even this thread.
    pub fn with_spare(name: &'static str, limit: usize) -> std::io::Result<Self> {
        let this = Self::new(name, limit);
        let shared = this.shared.clone();
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || shared.work_spare())?;
        this.shared.state.lock().spare = true;
        Ok(this)
    }

    /// Queues work. Never waits.
    ///
    /// # Errors
    /// Returns the work when the queue has no thread, the system gives none, and there is no spare one.
    pub fn start(&self, key: K, work: W) -> Result<(), W> {
        let mut state = self.shared.state.lock();
        let state = &mut *state;
        let queue = state.queues.entry(key).or_default();
        queue.waiting.push_back(work);
        state.pending += 1;
        if queue.waiting.len() <= queue.idle {
            queue.wanted.notify_one();
            return Ok(());
        }
        if queue.threads == self.limit {
            return Ok(());
        }
        let (shared, wanted) = (self.shared.clone(), queue.wanted.clone());
        let name = format!("{}-{}", self.name, state.started);
        match thread::Builder::new()
            .name(name)
            .spawn(move || shared.work(key, &wanted))
        {
            Ok(_) => {
                queue.threads += 1;
                state.threads += 1;
                state.started += 1;
            }
            Err(_) if queue.threads > 0 => {}
            Err(e) => {
                tracing::warn!("no thread for work that waits: {e}");
                if !state.spare {
                    state.pending -= 1;
                    return queue.waiting.pop_back().map_or(Ok(()), Err);
                }
                self.shared.starved.notify_one();
            }
        }
        Ok(())
    }

    /// Waits until all work is done, at most so long. False: some is not.
    pub fn wait_idle(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.shared.state.lock();
        while state.pending > 0 {
            if self.shared.ended.wait_until(&mut state, until).timed_out() {
                return state.pending == 0;
            }
        }
        true
    }

    /// Does what is queued, and waits until all threads but the spare one have exited.
    pub(crate) fn finish(&self) {
        self.shared.close();
        let mut state = self.shared.state.lock();
        while state.threads > 0 {
            self.shared.ended.wait(&mut state);
        }
    }
}

impl<K, W> Shared<K, W> {
    fn close(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        state.queues.values().for_each(|queue| {
            queue.wanted.notify_all();
        });
        self.starved.notify_all();
    }
}

impl<K: Copy + Ord, W: Work> Shared<K, W> {
    fn work(&self, key: K, wanted: &Condvar) {
        let mut state = self.state.lock();
        while let Some(work) = Self::next(&mut state, key, wanted) {
            self.run(&mut state, work);
        }
        state.threads -= 1;
        self.ended.notify_all();
    }

    /// The next work of a queue; `None`: the thread exits.
    fn next(state: &mut MutexGuard<'_, State<K, W>>, key: K, wanted: &Condvar) -> Option<W> {
        loop {
            let closing = state.closing;
            let queue = state.queues.get_mut(&key)?;
            if let Some(work) = queue.waiting.pop_front() {
                return Some(work);
            }
            let mut exits = closing;
            if !exits {
                queue.idle += 1;
                exits = wanted.wait_for(state, IDLE).timed_out();
            }
            let queue = state.queues.get_mut(&key)?;
            if !closing {
                queue.idle -= 1;
            }
            if exits && queue.waiting.is_empty() {
                queue.threads -= 1;
                if queue.threads == 0 {
                    state.queues.remove(&key);
                }
                return None;
            }
        }
    }

    /// The spare thread.
    fn work_spare(&self) {
        let mut state = self.state.lock();
        loop {
            let mut starved = state.queues.values_mut().filter(|queue| queue.threads == 0);
            let work = starved.find_map(|queue| queue.waiting.pop_front());
            state
                .queues
                .retain(|_, queue| queue.threads > 0 || !queue.waiting.is_empty());
            match work {
                Some(work) => self.run(&mut state, work),
                None if state.closing => return,
                None => self.starved.wait(&mut state),
            }
        }
    }

    fn run(&self, state: &mut MutexGuard<'_, State<K, W>>, work: W) {
        MutexGuard::unlocked(state, || {
            if catch_unwind(AssertUnwindSafe(|| work.run())).is_err() {
                tracing::error!("work of a thread panicked");
            }
        });
        state.pending -= 1;
        if state.pending == 0 {
            self.ended.notify_all();
        }
    }
}

impl<K, W> Drop for Workers<K, W> {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl<K, W> fmt::Debug for Workers<K, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        f.debug_struct("Workers")
            .field("pending", &state.pending)
            .field("threads", &state.threads)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    type Boxed = Box<dyn FnOnce() + Send>;

    /// Longer than any wait of a test that passes.
    const TIMEOUT: Duration = Duration::from_secs(60);

    fn workers(limit: usize) -> Workers<u8, Boxed> {
        Workers::with_spare("test", limit).unwrap()
    }

    fn start(workers: &Workers<u8, Boxed>, queue: u8, work: impl FnOnce() + Send + 'static) {
        assert!(workers.start(queue, Box::new(work)).is_ok());
    }

    /// Work that hangs until the sender is dropped.
    fn hang(workers: &Workers<u8, Boxed>, queue: u8) -> Sender<()> {
        let (release, held) = channel::<()>();
        start(workers, queue, move || held.recv().unwrap_or_default());
        release
    }

    #[test]
    fn work_that_hangs_keeps_neither_its_queue_nor_others() {
        let workers = workers(2);
        let hung = hang(&workers, 1);
        let (send, done) = channel();
        for queue in [1, 2] {
            let send = send.clone();
            start(&workers, queue, move || send.send(queue).unwrap());
            assert_eq!(done.recv_timeout(TIMEOUT), Ok(queue));
        }
        assert!(!workers.wait_idle(Duration::ZERO));
        drop(hung);
        assert!(workers.wait_idle(TIMEOUT));
    }

    #[test]
    fn beyond_the_limit_work_waits_in_order() {
        let workers = workers(2);
        let hung = [hang(&workers, 1), hang(&workers, 1)];
        let (send, done) = channel();
        for n in 0..100 {
            let send = send.clone();
            start(&workers, 1, move || send.send(n).unwrap());
        }
        let (others, answered) = channel();
        start(&workers, 2, move || others.send(()).unwrap());
        assert_eq!(answered.recv_timeout(TIMEOUT), Ok(()));
        assert_eq!(workers.shared.state.lock().threads, 3, "two of queue 1, one of queue 2");
        assert!(done.try_recv().is_err(), "both threads of the queue hang");
        let [first, second] = hung;
        drop(first);
        let all: Vec<i32> = done.iter().take(100).collect();
        assert_eq!(all, (0..100).collect::<Vec<_>>());
        drop(second);
        assert!(workers.wait_idle(TIMEOUT));
    }

    #[test]
    fn a_panic_ends_the_work_alone() {
        let workers = workers(1);
        start(&workers, 1, || panic!("as intended"));
        let (send, done) = channel();
        start(&workers, 1, move || send.send(()).unwrap());
        assert_eq!(done.recv_timeout(TIMEOUT), Ok(()));
        assert!(workers.wait_idle(TIMEOUT));
    }

    #[test]
    fn the_spare_thread_serves_queues_without_threads() {
        let workers = workers(1);
        let (send, done) = channel();
        // As after a thread could not be started.
        let mut state = workers.shared.state.lock();
        let work: Boxed = Box::new(move || send.send(()).unwrap());
        state.queues.entry(1).or_default().waiting.push_back(work);
        state.pending += 1;
        drop(state);
        workers.shared.starved.notify_one();
        assert_eq!(done.recv_timeout(TIMEOUT), Ok(()));
        assert!(workers.wait_idle(TIMEOUT));
    }

    #[test]
    fn queued_work_is_done_after_the_end() {
        let workers = workers(1);
        let hung = hang(&workers, 1);
        let (send, done) = channel();
        start(&workers, 1, move || send.send(()).unwrap());
        drop(workers);
        drop(hung);
        assert_eq!(done.recv_timeout(TIMEOUT), Ok(()));
    }
}
