//! A disk beside a device in one loop, which sleeps whenever it has nothing to do: nothing but the disk's descriptor tells
//! it that an operation is over.

use std::{
    fs::File,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

use crate::common::{Case, Ended, MIB, SESSION, TIMEOUT, config, everywhere, operation, take};
use rnbd::{
    Errno,
    block::BlockOp,
    server::disk::{DiskOp, Disks as _, StoreId},
};
use rnbd_disk::{Budget, Disk, Image};
use roce::reactor::{Handle, Interest, Reactor, ReactorConfig, Readiness, Service, SpinMode, Token, TurnCx};
use roce::{
    Completion, DeviceConfig, LocalDevice, Pages,
    verbs::provider::{Event, QpId},
};

const DISK: Token = Token(1);

enum Order {
    Do(u32, BlockOp, u64, u64),
    Stop,
}

/// Does what it is told to with one store.
struct Server {
    disk: Disk,
    store: StoreId,
    memory: Arc<Pages>,
    /// The disk may have something, or is to do something.
    hot: bool,
    budget: Budget,
    told: Sender<Ended>,
    /// Sleeps of the loop.
    sleeps: u64,
}

impl Server {
    fn new(cx: &mut TurnCx<'_, ()>, case: &Case, told: Sender<Ended>) -> Self {
        let mut disk = Disk::new(config(case.way)).unwrap();
        cx.sockets
            .register(disk.descriptor(), DISK, Interest::READABLE)
            .unwrap();
        let image = Image::open(&case.path(), true, case.caching).unwrap();
        Self {
            store: disk.add(image.into()),
            disk,
            memory: Pages::allocate(MIB as usize).unwrap(),
            hot: false,
            budget: Budget::default(),
            told,
            sleeps: 0,
        }
    }
}

impl Service for Server {
    type Command = Order;
    type Output = ();

    fn command(&mut self, cx: &mut TurnCx<'_, ()>, order: Order) {
        match order {
            Order::Do(ticket, op, offset, len) => {
                let op = DiskOp {
                    store: self.store,
                    op,
                    offset,
                    len,
                    data: 0,
                };
                self.disk.submit(operation(SESSION, ticket, op, &self.memory));
                self.hot = true;
            }
            Order::Stop => cx.stop(),
        }
    }

    fn ready(&mut self, _: &mut TurnCx<'_, ()>, token: Token, _: Readiness) {
        self.hot |= token == DISK;
    }

    fn completions(&mut self, _: &mut TurnCx<'_, ()>, _: &[(QpId, Completion)]) {}

    fn event(&mut self, _: &mut TurnCx<'_, ()>, _: Event) {}

    fn work(&mut self, _: &mut TurnCx<'_, ()>) -> bool {
        if !self.hot {
            return false;
        }
        self.hot = self.disk.pump(&mut self.budget);
        let mut any = false;
        for ended in take(&mut self.disk) {
            any = true;
            self.told.send(ended).unwrap();
        }
        any || self.hot
    }

    fn end(&mut self, cx: &mut TurnCx<'_, ()>) {
        self.budget = Budget::default();
        self.sleeps = cx.counters.sleeps;
    }
}

fn run(handle: &Handle<Order, ()>, told: &Receiver<Ended>, ticket: u32, op: BlockOp, offset: u64, len: u64) {
    handle.command(Order::Do(ticket, op, offset, len));
    let ended = told.recv_timeout(TIMEOUT).expect("the loop wakes up");
    assert_eq!(ended, (ticket, Ok(())));
}

#[test]
fn the_disk_wakes_a_loop_that_sleeps() {
    everywhere(|case| {
        File::create(case.path()).unwrap().set_len(MIB).unwrap();
        let config = ReactorConfig {
            spin: SpinMode::Off,
            ..ReactorConfig::default()
        };
        let reactor = Reactor::<Server>::new(config).unwrap();
        let handle = reactor.handle();
        let (tell, told) = channel();
        let sleeps = thread::scope(|scope| {
            let looping = scope.spawn(|| {
                let addr = ferroce_loopback::address().into();
                let device = LocalDevice::open(&[DeviceConfig::new(addr)]).unwrap();
                let server = reactor.run(device, |cx| Server::new(cx, case, tell)).unwrap();
                server.sleeps
            });
            let write = |fua| BlockOp::Write { fua };
            let zero = BlockOp::WriteZeroes {
                fua: true,
                may_unmap: false,
            };
            let all = [
                write(false),
                BlockOp::Flush,
                BlockOp::Read,
                write(true),
                zero,
                BlockOp::Discard,
            ];
            for n in 0..20 {
                for (i, op) in (0..).zip(all) {
                    run(&handle, &told, n * 10 + i, op, u64::from(n) * 4096, 4096);
                }
            }
            // One that fails, and many at once.
            handle.command(Order::Do(1000, BlockOp::Read, MIB, 512));
            assert_eq!(told.recv_timeout(TIMEOUT).unwrap(), (1000, Err(Errno::EIO)));
            for n in 0..500 {
                let op = if n % 5 == 0 { BlockOp::Flush } else { write(n % 3 == 0) };
                handle.command(Order::Do(2000 + n, op, u64::from(n) % 200 * 4096, 4096));
            }
            let mut ended: Vec<_> = told.iter().take(500).collect();
            ended.sort_by_key(|(ticket, _)| *ticket);
            assert!(ended.into_iter().eq((2000..2500).map(|ticket| (ticket, Ok(())))));
            handle.command(Order::Stop);
            looping.join().unwrap()
        });
        assert!(sleeps > 0, "{:?}: it never slept", case.way);
    });
}
