//! Operations on files, and the queues where they wait for a thread of an engine (`super::engine`).
//!
//! - QUE-1 Every operation ends once, with success or a failure that says where.
//! - QUE-2 A call that does a part of an operation is followed by others for the rest.
//! - QUE-3 A queue that is closed is emptied first. Its threads end then.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use rustix::event::EventfdFlags;

use super::disk::{Disk, progress};

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tier) enum Kind {
    Read,
    Write,
    /// Make durable what was written before.
    Sync,
}

/// A file that operations are done on.
pub(in crate::tier) struct Target {
    /// What a ring uses.
    pub(in crate::tier) file: Arc<File>,
    /// What positional calls use: the file, or what stands between.
    pub(in crate::tier) disk: Arc<dyn Disk>,
    /// Where a call has done a part only, the rest begins at a multiple of this.
    pub(in crate::tier) unit_bytes: usize,
}

/// What failed, and where.
#[derive(Debug)]
pub(in crate::tier) struct Failure {
    /// The number of the queue.
    pub(in crate::tier) queue: usize,
    pub(in crate::tier) offset: u64,
    pub(in crate::tier) error: io::Error,
}

/// What operations belong to. It keeps their memory until the last of them has ended, also where
/// the caller waits for them no more.
pub(in crate::tier) trait Outcome: Send + Sync {
    /// One of its operations has ended.
    fn end_operation(&self, failure: Option<Failure>);

    /// One of its operations never ends, because what would end it is gone. The memory is nobody's
    /// from now on: a drive may still write to it.
    fn abandon(&self, failure: Failure);
}

/// One operation on one file.
pub(in crate::tier) struct Operation {
    pub(in crate::tier) kind: Kind,
    /// In the file, of what is still to be done.
    pub(in crate::tier) offset: u64,
    /// Of what is still to be done. The request keeps the memory that it lies in.
    pub(in crate::tier) memory: *mut u8,
    pub(in crate::tier) nbytes: usize,
    /// The number of the registered buffer that the memory lies in, if it does.
    pub(in crate::tier) buffer: Option<u16>,
    /// The number of the queue.
    pub(in crate::tier) queue: u16,
    /// Another file than the queue's own. Closed before the operation has ended.
    pub(in crate::tier) target: Option<Arc<Target>>,
    pub(in crate::tier) request: Arc<dyn Outcome>,
}

// SAFETY: the memory is kept by the request until the operation has ended ([`Outcome`]), and
// operations of one request have disjoint parts of it. So it may be used from any one thread.
unsafe impl Send for Operation {}

pub(in crate::tier) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Operation {
    fn end(mut self, failure: Option<Failure>) {
        drop(self.target.take());
        self.request.end_operation(failure);
    }

    /// So many bytes more are done. What is left is still to be done, if anything.
    fn advance(mut self, nbytes: usize) -> Option<Self> {
        let nbytes = nbytes.min(self.nbytes);
        self.nbytes -= nbytes;
        if self.nbytes == 0 {
            self.end(None);
            return None;
        }
        self.offset += nbytes as u64;
        // SAFETY: less than the bytes that there were, so still within the memory.
        self.memory = unsafe { self.memory.add(nbytes) };
        Some(self)
    }

    /// It has come this far. What is left is still to be done, if anything.
    ///
    /// `own` is the file of its queue.
    pub(super) fn returned(
        self,
        returned: io::Result<usize>,
        own: Option<&Target>,
    ) -> Option<Self> {
        if self.kind == Kind::Sync {
            let failure = returned.err().map(|error| self.failure(error));
            self.end(failure);
            return None;
        }
        let unit_bytes = self.target.as_deref().or(own).map_or(1, |target| target.unit_bytes);
        match progress(returned, self.kind == Kind::Read, unit_bytes) {
            Ok(nbytes) => self.advance(nbytes),
            Err(error) => {
                let failure = self.failure(error);
                self.end(Some(failure));
                None
            }
        }
    }

    pub(super) fn failure(&self, error: io::Error) -> Failure {
        Failure { queue: usize::from(self.queue), offset: self.offset, error }
    }
}

#[derive(Default)]
struct Waiting {
    operations: VecDeque<Operation>,
    is_closed: bool,
    /// The thread with the ring waits in the kernel and has to be woken there.
    is_parked: bool,
}

/// The operations for one drive that no thread has taken yet.
pub(in crate::tier) struct Queue {
    waiting: Mutex<Waiting>,
    pushed: Condvar,
    pub(super) event: OwnedFd,
}

impl Queue {
    pub(super) fn new(operations_max: usize) -> io::Result<Arc<Self>> {
        let waiting =
            Waiting { operations: VecDeque::with_capacity(operations_max), ..Default::default() };
        Ok(Arc::new(Self {
            waiting: Mutex::new(waiting),
            pushed: Condvar::new(),
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    pub(in crate::tier) fn push(&self, operation: Operation) {
        self.change(|waiting| waiting.operations.push_back(operation));
    }

    pub(super) fn close(&self) {
        self.change(|waiting| waiting.is_closed = true);
        self.pushed.notify_all();
    }

    fn change(&self, change: impl FnOnce(&mut Waiting)) {
        let mut waiting = lock(&self.waiting);
        change(&mut waiting);
        let is_parked = std::mem::take(&mut waiting.is_parked);
        drop(waiting);
        self.pushed.notify_one();
        if is_parked {
            // Full only if 2^64 - 2 wakes are unread: it is readable then, which wakes as well.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// The next operation, which is waited for; none when the queue is closed and empty.
    pub(super) fn wait(&self) -> Option<Operation> {
        let waiting = lock(&self.waiting);
        let mut waiting = self
            .pushed
            .wait_while(waiting, |waiting| waiting.operations.is_empty() && !waiting.is_closed)
            .unwrap_or_else(PoisonError::into_inner);
        waiting.operations.pop_front()
    }

    /// Takes up to `num` operations. Where none is left behind, the next push writes to the event.
    /// Whether the queue is closed and empty.
    pub(super) fn take(&self, num: usize, mut take: impl FnMut(Operation)) -> bool {
        let mut waiting = lock(&self.waiting);
        for _ in 0..num.min(waiting.operations.len()) {
            waiting.operations.pop_front().into_iter().for_each(&mut take);
        }
        let is_empty = waiting.operations.is_empty();
        waiting.is_parked = is_empty && !waiting.is_closed;
        is_empty && waiting.is_closed
    }
}
