//! Interfaces that go down under a mapping.
//!
//! A thread of its own watches them: on a host with many interfaces the kernel takes milliseconds to list them, and others' changes must
//! not hold up a loop.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
    sync::Arc,
    thread::{Builder, JoinHandle},
};

use mio::{Events, Interest, Poll, Token, Waker, unix::SourceFd};
use roce::reactor::Handle;
use roce_net::links::LinkWatch;

use crate::mapper::command::Command;

const WATCH: Token = Token(0);
const STOP: Token = Token(1);

/// Thread that watches the interfaces of this network namespace, until this is dropped.
#[derive(Debug)]
pub(crate) struct Links {
    stop: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Links {
    /// Notifies the loop of addresses that lose their link. `None` where the system has no netlink or gives no thread: paths by them then
    /// end as other silent paths do.
    pub(crate) fn watch(handle: Handle<Command, ()>) -> Option<Self> {
        let watched = Self::begin(handle);
        watched
            .inspect_err(|e| tracing::warn!("interfaces that go down are not noticed at once: {e}"))
            .ok()
    }

    fn begin(handle: Handle<Command, ()>) -> io::Result<Self> {
        let links = LinkWatch::new()?;
        let poll = Poll::new()?;
        let stop = Arc::new(Waker::new(poll.registry(), STOP)?);
        let fd = links.as_fd().as_raw_fd();
        poll.registry()
            .register(&mut SourceFd(&fd), WATCH, Interest::READABLE)?;
        let thread = Builder::new()
            .name("ferroce-links".to_owned())
            .spawn(move || run(poll, links, &handle))?;
        let thread = Some(thread);
        Ok(Self { stop, thread })
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        if self.stop.wake().is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn run(mut poll: Poll, mut links: LinkWatch, handle: &Handle<Command, ()>) {
    let mut events = Events::with_capacity(4);
    loop {
        match poll.poll(&mut events, None) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return tracing::error!("waiting for changes of interfaces failed: {e}"),
            Ok(()) => {}
        }
        if events.iter().any(|event| event.token() == STOP) {
            return;
        }
        match links.take_lost() {
            Ok(lost) => lost
                .into_iter()
                .for_each(|addr| handle.command(Command::LinkDown(addr))),
            Err(e) => tracing::warn!("reading changes of interfaces failed: {e}"),
        }
    }
}
