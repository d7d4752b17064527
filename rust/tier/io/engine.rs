//! Engines: what moves bytes between memory and files, on threads of its own.
//!
//! An engine has queues of operations, one for each drive. The threads of a queue take them: one
//! with a ring ([`super::uring`]), or several that each make one positional call at a time. A queue
//! may have a file of its own; an operation may bring another one.
//!
//! What holds of operations and queues stands in [`super::queue`].
//!
//! - ENG-1 Threads of an engine log nothing and wait for no interpreter.

use std::{
    io,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel, sync_channel},
    },
};

use rustix::io::Errno;

use super::{
    queue::{Kind, Operation, Queue, Target, lock},
    uring::{self, Ring, Shortcomings},
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
