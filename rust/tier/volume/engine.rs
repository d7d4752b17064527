//! Engines: what moves the bytes of a member, on threads of its own.
//!
//! Each member has a queue of operations. Its threads take them: one with a ring
//! ([`super::uring`]), or several that each make one positional call at a time.
//!
//! - ENG-1 Every operation ends once, with success or a failure that says where.
//! - ENG-2 A call that does a part of an operation is followed by others for the rest.
//! - ENG-3 A queue that is closed is emptied first. Its threads end then.
//! - ENG-4 Threads of an engine log nothing and wait for no interpreter.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel, sync_channel},
    },
};

use rustix::{event::EventfdFlags, io::Errno};

use super::{
    buffers::Buffers,
    disk::{Disk, progress},
    member::Member,
    request::{Failure, Request, lock},
    uring::{self, Ring},
};
use crate::{Error, Result, host::memory::memlock_limit_bytes};

/// Which engine moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring where the kernel offers it, else positional calls, with a warning.
    #[default]
    Auto,
    /// io_uring; an error where the kernel does not offer it.
    IoUring,
    /// `pread` and `pwrite` on several threads per member.
    Positional,
}

/// The most threads per member that make positional calls.
const POSITIONAL_THREADS_MAX: usize = 8;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    /// Make durable what was written before.
    Sync,
}

/// One operation on one member.
pub(super) struct Operation {
    pub(super) kind: Kind,
    /// In the member's file, of what is still to be done.
    pub(super) offset: u64,
    /// Of what is still to be done. The request owns the buffer that it lies in.
    pub(super) memory: *mut u8,
    pub(super) nbytes: usize,
    /// The number of that buffer, if it is one of the volume's buffers.
    pub(super) buffer: Option<u16>,
    pub(super) member: u16,
    pub(super) request: Arc<Request>,
}

// SAFETY: the memory lies in a buffer that the request owns until the operation has ended (REQ-1),
// and operations of one request have disjoint parts of it. So it may be used from any one thread.
unsafe impl Send for Operation {}

impl Operation {
    /// So many bytes more are done. What is left is still to be done, if anything.
    fn advance(mut self, nbytes: usize) -> Option<Self> {
        let nbytes = nbytes.min(self.nbytes);
        self.nbytes -= nbytes;
        if self.nbytes == 0 {
            self.request.end_operation(None);
            return None;
        }
        self.offset += nbytes as u64;
        // SAFETY: less than the bytes that there were, so still within the buffer.
        self.memory = unsafe { self.memory.add(nbytes) };
        Some(self)
    }

    /// It has come this far. What is left is still to be done, if anything.
    pub(super) fn returned(self, returned: io::Result<usize>) -> Option<Self> {
        if self.kind == Kind::Sync {
            self.request.end_operation(returned.err().map(|error| self.failure(error)));
            return None;
        }
        match progress(returned, self.kind == Kind::Read) {
            Ok(nbytes) => self.advance(nbytes),
            Err(error) => {
                self.request.end_operation(Some(self.failure(error)));
                None
            }
        }
    }

    pub(super) fn failure(&self, error: io::Error) -> Failure {
        Failure { member: usize::from(self.member), offset: self.offset, error }
    }
}

#[derive(Default)]
struct Waiting {
    operations: VecDeque<Operation>,
    is_closed: bool,
    /// The thread with the ring waits in the kernel and has to be woken there.
    is_parked: bool,
}

/// The operations of one member that no thread has taken yet.
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    pushed: Condvar,
    pub(super) event: OwnedFd,
}

impl Queue {
    fn new(operations_max: usize) -> io::Result<Arc<Self>> {
        let waiting =
            Waiting { operations: VecDeque::with_capacity(operations_max), ..Default::default() };
        Ok(Arc::new(Self {
            waiting: Mutex::new(waiting),
            pushed: Condvar::new(),
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    pub(super) fn push(&self, operation: Operation) {
        self.change(|waiting| waiting.operations.push_back(operation));
    }

    fn close(&self) {
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

/// What io_uring cannot do here.
pub(super) struct Shortcomings {
    /// Why buffers are not registered.
    pub(super) buffers: Option<io::Error>,
}

/// The queues of all members and the threads that empty them.
pub(super) struct Engine {
    pub(super) queues: Vec<Arc<Queue>>,
    /// Is disconnected when all threads have ended. A mutex: a receiver alone is one thread's.
    ended: Mutex<Option<Receiver<()>>>,
    pub(super) has_rings: bool,
}

impl Engine {
    /// Starts the threads. `operations_max` are in a queue at most, `depth` at a drive.
    pub(super) fn start(
        kind: EngineKind,
        volume: &str,
        members: &[Member],
        buffers: &Arc<Buffers>,
        depth: usize,
        operations_max: usize,
    ) -> Result<Self> {
        let refused = |error: io::Error| {
            Error::os(format!("cannot start the threads of volume `{volume}`"), error)
        };
        if kind != EngineKind::Positional {
            let mut engine = Self::new(members.len(), operations_max).map_err(refused)?;
            match engine.start_rings(members, buffers, depth) {
                Ok(shortcomings) => {
                    warn_of(volume, &shortcomings);
                    return Ok(engine);
                }
                Err(error) if kind == EngineKind::IoUring => {
                    let hint = hint_of(&error);
                    return Err(Error::os(
                        format!("cannot use io_uring for volume `{volume}`; hint: {hint}"),
                        error,
                    ));
                }
                // Rings that were made end with their queues.
                Err(error) => warn_without_rings(volume, &error),
            }
        }
        let mut engine = Self::new(members.len(), operations_max).map_err(refused)?;
        engine.start_positional(members, depth).map_err(refused)?;
        Ok(engine)
    }

    fn new(num_members: usize, operations_max: usize) -> io::Result<Self> {
        let queues: io::Result<Vec<_>> =
            (0..num_members).map(|_| Queue::new(operations_max)).collect();
        Ok(Self { queues: queues?, ended: Mutex::new(None), has_rings: false })
    }

    fn start_rings(
        &mut self,
        members: &[Member],
        buffers: &Arc<Buffers>,
        depth: usize,
    ) -> io::Result<Shortcomings> {
        let mut shortcomings = Shortcomings { buffers: None };
        let (running, ended) = channel();
        *lock(&self.ended) = Some(ended);
        for (number, (member, queue)) in members.iter().zip(&self.queues).enumerate() {
            let (tell, told) = sync_channel(1);
            let (queue, file) = (Arc::clone(queue), Arc::clone(&member.file));
            let buffers = Arc::clone(buffers);
            // The thread makes its ring: the kernel then lets no other one use it.
            spawn(number, running.clone(), move || {
                match Ring::new(&queue, file, &buffers, depth) {
                    Err(error) => {
                        let _ = tell.send(Err(error));
                    }
                    Ok((ring, shortcomings)) => {
                        let _ = tell.send(Ok(shortcomings));
                        uring::run(ring, &queue);
                    }
                }
            })?;
            let of_member = told.recv().map_err(|_| io::Error::other("its thread has ended"))??;
            shortcomings.buffers = shortcomings.buffers.or(of_member.buffers);
        }
        self.has_rings = true;
        Ok(shortcomings)
    }

    fn start_positional(&mut self, members: &[Member], depth: usize) -> io::Result<()> {
        let (running, ended) = channel();
        *lock(&self.ended) = Some(ended);
        for (number, (member, queue)) in members.iter().zip(&self.queues).enumerate() {
            for _ in 0..depth.min(POSITIONAL_THREADS_MAX) {
                let (queue, disk) = (Arc::clone(queue), Arc::clone(&member.disk));
                spawn(number, running.clone(), move || {
                    while let Some(operation) = queue.wait() {
                        run_positional(operation, &*disk);
                    }
                })?;
            }
        }
        Ok(())
    }

    /// Lets the threads end when all operations have. What it returns, once, is disconnected when
    /// they have. They own all that they use, so nothing has to wait for them.
    pub(super) fn close(&mut self) -> Option<Receiver<()>> {
        self.queues.iter().for_each(|queue| queue.close());
        lock(&self.ended).take()
    }

    /// The threads are another process's.
    pub(super) fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.queues));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

fn spawn(
    member: usize,
    running: Sender<()>,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let run = move || {
        run();
        drop(running);
    };
    std::thread::Builder::new().name(format!("stepwell-vol-{member}")).spawn(run).map(|_| ())
}

/// One operation, in as many calls as it takes.
fn run_positional(operation: Operation, disk: &dyn Disk) {
    let mut rest = Some(operation);
    while let Some(operation) = rest {
        let Operation { kind, offset, memory, nbytes, .. } = operation;
        let returned = match kind {
            Kind::Read => {
                // SAFETY: the memory is this operation's alone until it has ended, `nbytes` of a
                // buffer that is initialised.
                let memory = unsafe { std::slice::from_raw_parts_mut(memory, nbytes) };
                disk.read_at(memory, offset)
            }
            Kind::Write => {
                // SAFETY: as above; nothing writes to it meanwhile.
                let memory = unsafe { std::slice::from_raw_parts(memory, nbytes) };
                disk.write_at(memory, offset)
            }
            Kind::Sync => disk.sync().map(|()| 0),
        };
        rest = operation.returned(returned);
    }
}

fn hint_of(error: &io::Error) -> String {
    if error.raw_os_error() == Some(Errno::NOMEM.raw_os_error()) {
        return format!(
            "its rings count against RLIMIT_MEMLOCK, which is `{}`: raise it (`ulimit -l \
             unlimited`, `--ulimit memlock=-1` for a container)",
            memlock_limit()
        );
    }
    "`sysctl kernel.io_uring_disabled` is 0 where it is allowed, and a container's seccomp profile \
     has to allow it"
        .to_owned()
}

fn memlock_limit() -> String {
    memlock_limit_bytes().map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"))
}

fn warn_without_rings(volume: &str, error: &io::Error) {
    log::warn!(
        target: "stepwell",
        "volume `{volume}`: the kernel does not offer io_uring ({error}); positional reads and \
         writes on up to {POSITIONAL_THREADS_MAX} threads per member instead; hint: {}",
        hint_of(error)
    );
}

fn warn_of(volume: &str, shortcomings: &Shortcomings) {
    if let Some(error) = &shortcomings.buffers {
        log::warn!(
            target: "stepwell",
            "volume `{volume}`: buffers are not registered with io_uring ({error}), so the kernel \
             looks up their pages for each read and write; RLIMIT_MEMLOCK is `{}`; hint: raise it \
             (`ulimit -l unlimited`, `--ulimit memlock=-1` for a container)",
            memlock_limit()
        );
    }
}
