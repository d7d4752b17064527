//! Engines: what moves bytes between memory and files, on threads of its own.
//!
//! An engine has queues of operations, one for each drive. The threads of a queue take them: one
//! with a ring ([`super::uring`]), or several that each make one positional call at a time. A queue
//! may have a file of its own; an operation may bring another one.
//!
//! - ENG-1 Every operation ends once, with success or a failure that says where.
//! - ENG-2 A call that does a part of an operation is followed by others for the rest.
//! - ENG-3 A queue that is closed is emptied first. Its threads end then.
//! - ENG-4 Threads of an engine log nothing and wait for no interpreter.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel, sync_channel},
    },
};

use rustix::{event::EventfdFlags, io::Errno};

use super::{
    disk::{Disk, progress},
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

/// The most threads per queue that make positional calls.
const POSITIONAL_THREADS_MAX: usize = 8;

/// The most operations that a drive is given at once.
pub const QUEUE_DEPTH_MAX: usize = 4096;

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
    fn new(operations_max: usize) -> io::Result<Arc<Self>> {
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

/// Queues and the threads that empty them.
pub(in crate::tier) struct Engine {
    pub(in crate::tier) queues: Vec<Arc<Queue>>,
    /// Is disconnected when all threads have ended. A mutex: a receiver alone is one thread's.
    ended: Mutex<Option<Receiver<()>>>,
    pub(in crate::tier) has_rings: bool,
}

impl Engine {
    /// Starts the threads of one queue for each of `own`: the file of the queue, if it has one.
    ///
    /// `whose` is for people. `operations_max` are in a queue at most without growing it, `depth`
    /// at a drive. `buffers` are the addresses and sizes of memory to register, which is mapped as
    /// long as operations name it.
    pub(in crate::tier) fn start(
        kind: EngineKind,
        whose: &str,
        own: &[Option<Arc<Target>>],
        buffers: &[(usize, usize)],
        depth: usize,
        operations_max: usize,
    ) -> Result<Self> {
        let refused =
            |error: io::Error| Error::os(format!("cannot start the threads of {whose}"), error);
        if kind != EngineKind::Positional {
            let mut engine = Self::new(own.len(), operations_max).map_err(refused)?;
            match engine.start_rings(own, buffers, depth) {
                Ok(shortcomings) => {
                    warn_of(whose, &shortcomings);
                    return Ok(engine);
                }
                Err(error) if kind == EngineKind::IoUring => {
                    let hint = hint_of(&error);
                    return Err(Error::os(
                        format!("cannot use io_uring for {whose}; hint: {hint}"),
                        error,
                    ));
                }
                // Rings that were made end with their queues.
                Err(error) => warn_without_rings(whose, &error),
            }
        }
        let mut engine = Self::new(own.len(), operations_max).map_err(refused)?;
        engine.start_positional(own, depth).map_err(refused)?;
        Ok(engine)
    }

    fn new(num_queues: usize, operations_max: usize) -> io::Result<Self> {
        let queues: io::Result<Vec<_>> =
            (0..num_queues).map(|_| Queue::new(operations_max)).collect();
        Ok(Self { queues: queues?, ended: Mutex::new(None), has_rings: false })
    }

    fn start_rings(
        &mut self,
        own: &[Option<Arc<Target>>],
        buffers: &[(usize, usize)],
        depth: usize,
    ) -> io::Result<Shortcomings> {
        let mut shortcomings = Shortcomings { buffers: None };
        let (running, ended) = channel();
        *lock(&self.ended) = Some(ended);
        for (number, (own, queue)) in own.iter().zip(&self.queues).enumerate() {
            let (tell, told) = sync_channel(1);
            let (queue, own, buffers) = (Arc::clone(queue), own.clone(), buffers.to_vec());
            // The thread makes its ring: the kernel then lets no other one use it.
            spawn(number, running.clone(), move || {
                match Ring::new(&queue, own, &buffers, depth) {
                    Err(error) => {
                        let _ = tell.send(Err(error));
                    }
                    Ok((ring, shortcomings)) => {
                        let _ = tell.send(Ok(shortcomings));
                        uring::run(ring, &queue);
                    }
                }
            })?;
            let of_queue = told.recv().map_err(|_| io::Error::other("its thread has ended"))??;
            shortcomings.buffers = shortcomings.buffers.or(of_queue.buffers);
        }
        self.has_rings = true;
        Ok(shortcomings)
    }

    fn start_positional(&mut self, own: &[Option<Arc<Target>>], depth: usize) -> io::Result<()> {
        let (running, ended) = channel();
        *lock(&self.ended) = Some(ended);
        for (number, (own, queue)) in own.iter().zip(&self.queues).enumerate() {
            for _ in 0..depth.min(POSITIONAL_THREADS_MAX) {
                let (queue, own) = (Arc::clone(queue), own.clone());
                spawn(number, running.clone(), move || {
                    while let Some(operation) = queue.wait() {
                        run_positional(operation, own.as_deref());
                    }
                })?;
            }
        }
        Ok(())
    }

    /// Lets the threads end when all operations have. What it returns, once, is disconnected when
    /// they have. They own all that they use, so nothing has to wait for them.
    pub(in crate::tier) fn close(&mut self) -> Option<Receiver<()>> {
        self.queues.iter().for_each(|queue| queue.close());
        lock(&self.ended).take()
    }

    /// The threads are another process's.
    pub(in crate::tier) fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.queues));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

fn spawn(queue: usize, running: Sender<()>, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let run = move || {
        run();
        drop(running);
    };
    std::thread::Builder::new().name(format!("stepwell-io-{queue}")).spawn(run).map(|_| ())
}

/// One operation, in as many calls as it takes.
fn run_positional(operation: Operation, own: Option<&Target>) {
    let mut rest = Some(operation);
    while let Some(operation) = rest {
        let Operation { kind, offset, memory, nbytes, .. } = operation;
        let returned = match operation.target.as_deref().or(own).map(|target| &*target.disk) {
            None => Err(Errno::BADF.into()),
            Some(disk) => match kind {
                Kind::Read => {
                    // SAFETY: the memory is this operation's alone until it has ended, `nbytes`
                    // that are initialised.
                    let memory = unsafe { std::slice::from_raw_parts_mut(memory, nbytes) };
                    disk.read_at(memory, offset)
                }
                Kind::Write => {
                    // SAFETY: as above; nothing writes to it meanwhile.
                    let memory = unsafe { std::slice::from_raw_parts(memory, nbytes) };
                    disk.write_at(memory, offset)
                }
                Kind::Sync => disk.sync().map(|()| 0),
            },
        };
        rest = operation.returned(returned, own);
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

fn warn_without_rings(whose: &str, error: &io::Error) {
    log::warn!(
        target: "stepwell",
        "{whose}: the kernel does not offer io_uring ({error}); positional reads and \
         writes on up to {POSITIONAL_THREADS_MAX} threads per drive instead; hint: {}",
        hint_of(error)
    );
}

fn warn_of(whose: &str, shortcomings: &Shortcomings) {
    if let Some(error) = &shortcomings.buffers {
        log::warn!(
            target: "stepwell",
            "{whose}: buffers are not registered with io_uring ({error}), so the kernel \
             looks up their pages for each read and write; RLIMIT_MEMLOCK is `{}`; hint: raise it \
             (`ulimit -l unlimited`, `--ulimit memlock=-1` for a container)",
            memlock_limit()
        );
    }
}
