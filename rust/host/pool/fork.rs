//! Keeps `fork` and running jobs apart, so that a child never inherits a lock that nobody will
//! release.
//!
//! Every call that uses a pool's locks or workers stands inside a gate ([`enter`]). The handlers
//! that `pthread_atfork` runs close it, wait until it is empty, and open it again in parent and
//! child. So at the moment of a fork no pool has a job in flight, no lock of a pool is held, and no
//! buffer is half written. A `fork` therefore waits for the jobs that run at that time; jobs
//! started after it wait for the fork.
//!
//! Two rules follow. Nothing inside the gate waits for a lock that a forking thread may hold
//! (Python holds the GIL while it forks, and a log record takes the GIL): so a task must not, and
//! pools log after they have left. And a task must not fork except to `exec`: its `fork` is let
//! through (waiting for the task's own job would never end), but the child is left with the middle
//! of a job.
//!
//! Cost: two atomic additions per job.

use std::cell::Cell;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::futex;
use crate::{Error, Result};

/// Set while a fork waits or is under way; the bits below count the threads inside.
const FORKING: u32 = 1 << 31;

static GATE: AtomicU32 = AtomicU32::new(0);

/// Counts the forks between the first process and this one: what threads belong to another value do
/// not exist here.
static GENERATION: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// Whether this thread is running a task, on a worker or inline.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is running a task.
pub(super) fn in_task() -> bool {
    IN_TASK.get()
}

/// The calling thread runs tasks until the guard drops.
pub(super) struct TaskScope {
    before: bool,
}

impl TaskScope {
    pub(super) fn new() -> Self {
        Self { before: IN_TASK.replace(true) }
    }
}

impl Drop for TaskScope {
    fn drop(&mut self) {
        IN_TASK.set(self.before);
    }
}

/// The generation of this process.
pub(super) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Inside the gate until dropped.
pub(super) struct Entered {
    /// `None` for a call from a task, whose job already stands inside.
    generation: Option<u32>,
}

/// Waits out a fork, then enters the gate.
pub(super) fn enter() -> Entered {
    if in_task() {
        return Entered { generation: None };
    }
    loop {
        let seen = GATE.load(Ordering::Relaxed);
        if seen & FORKING != 0 {
            futex::wait(&GATE, seen);
        } else if GATE
            .compare_exchange_weak(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
        {
            return Entered { generation: Some(generation()) };
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // In a child forked by a task the gate was emptied: this entry is not counted there.
        if self.generation == Some(generation())
            && GATE.fetch_sub(1, Ordering::Release) == FORKING + 1
        {
            futex::wake_all(&GATE);
        }
    }
}

/// Registers the handlers, once per process image.
pub(super) fn register() -> Result<()> {
    static REGISTERED: OnceLock<i32> = OnceLock::new();
    let errno = *REGISTERED.get_or_init(|| {
        // SAFETY: the handlers are `extern "C"` functions that live as long as this library (the C
        // library drops them when it is unloaded). They touch atomics and futexes only: no
        // allocation, no lock, no unwinding.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) }
    });
    if errno == 0 {
        Ok(())
    } else {
        Err(Error::os("cannot register a fork handler", io::Error::from_raw_os_error(errno)))
    }
}

extern "C" fn prepare() {
    if in_task() {
        return;
    }
    loop {
        let seen = GATE.load(Ordering::Relaxed);
        if seen & FORKING != 0 {
            futex::wait(&GATE, seen);
        } else if GATE
            .compare_exchange_weak(seen, seen | FORKING, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
        {
            break;
        }
    }
    loop {
        let seen = GATE.load(Ordering::Acquire);
        if seen == FORKING {
            return;
        }
        futex::wait(&GATE, seen);
    }
}

extern "C" fn parent() {
    if !in_task() {
        GATE.fetch_and(!FORKING, Ordering::Release);
        futex::wake_all(&GATE);
    }
}

extern "C" fn child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    GATE.store(0, Ordering::Release);
}
