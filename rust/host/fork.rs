//! Keeps `fork` and running jobs apart, so that a child never inherits a lock that no thread will
//! release.
//!
//! Every call that uses a pool's locks or workers, or the lock of this process's claims, stands
//! inside a gate ([`enter`]). The handlers that `pthread_atfork` runs close it, wait until it is
//! empty, and open it again in parent and child. So at the moment of a fork no pool has a job in
//! flight, none of these locks is held, and no buffer is half written. A `fork` therefore waits for
//! the jobs that run at that time; jobs started after it wait for the fork.
//!
//! Two rules follow. Nothing inside the gate waits for a lock that a forking thread may hold, such
//! as Python's GIL: so a task must not, and what takes log records must not. And a task must not
//! fork except to `exec`: its `fork` is let through (waiting for the task's own job would never
//! end), but the child is left with the middle of a job.
//!
//! Cost: two atomic additions per job.

use std::cell::Cell;
use std::io;
use std::sync::OnceLock;

use crate::host::futex;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Mutex, PoisonError, thread_local};
use crate::{Error, Result};

/// Set while a fork waits or is under way; the bits below count the threads inside.
const FORKING: u32 = 1 << 31;

/// Forks wait for the threads inside; threads wait for a fork.
pub(super) struct Gate {
    /// `FORKING` and the number of threads inside. Forks and threads sleep on it.
    state: AtomicU32,
    /// Counts the forks between the first process and this one. Threads that belong to another
    /// value do not exist here.
    generation: AtomicU32,
}

/// The gate of this process.
#[cfg(not(feature = "shuttle"))]
static GATE: Gate = Gate::new();

#[cfg(feature = "shuttle")]
shuttle::lazy_static! {
    /// The gate of this run of the model.
    pub(super) static ref GATE: Gate = Gate::new();
}

thread_local! {
    /// Whether this thread is running a task, on a worker or inline.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is running a task.
pub(super) fn in_task() -> bool {
    IN_TASK.with(Cell::get)
}

/// The calling thread runs tasks until the guard drops.
pub(super) struct TaskScope {
    before: bool,
}

impl TaskScope {
    pub(super) fn new() -> Self {
        Self { before: IN_TASK.with(|in_task| in_task.replace(true)) }
    }
}

impl Drop for TaskScope {
    fn drop(&mut self) {
        IN_TASK.with(|in_task| in_task.set(self.before));
    }
}

/// The generation of this process.
pub(in crate::host) fn generation() -> u32 {
    GATE.generation()
}

/// Waits out a fork, then enters the gate of this process.
pub(in crate::host) fn enter() -> Entered<'static> {
    GATE.enter()
}

/// What each process makes for itself on first use. The parent's is left alone in a child: its
/// threads are not there, and its locks may be held.
pub(in crate::host) struct PerProcess<T: 'static>(Mutex<Option<(u32, &'static T)>>);

impl<T> PerProcess<T> {
    pub(in crate::host) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// This process's. Called inside the gate.
    ///
    /// # Errors
    /// That of `make`; tried again on the next call.
    pub(in crate::host) fn get_or_make(
        &self,
        make: impl FnOnce() -> Result<&'static T>,
    ) -> Result<&'static T> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, one)) = made.filter(|&(of, _)| of == generation()) {
            return Ok(one);
        }
        let one = make()?;
        *made = Some((generation(), one));
        Ok(one)
    }
}

/// Inside the gate until dropped.
pub(in crate::host) struct Entered<'a> {
    gate: &'a Gate,
    /// `None` for a call from a task: the task's job is inside already.
    generation: Option<u32>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // A child that a task has forked starts with an empty gate: this entry is not counted
        // there.
        if self.generation == Some(self.gate.generation()) {
            self.gate.leave();
        }
    }
}

impl Gate {
    pub(super) const fn new() -> Self {
        Self { state: AtomicU32::new(0), generation: AtomicU32::new(0) }
    }

    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Waits out a fork, then enters.
    pub(super) fn enter(&self) -> Entered<'_> {
        if in_task() {
            return Entered { gate: self, generation: None };
        }
        self.change_unless_forking(|state| state + 1);
        Entered { gate: self, generation: Some(self.generation()) }
    }

    fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::Release) == FORKING + 1 {
            futex::wake_all(&self.state);
        }
    }

    /// Waits out a fork, then changes the state.
    fn change_unless_forking(&self, change: impl Fn(u32) -> u32) {
        loop {
            let seen = self.state.load(Ordering::Relaxed);
            if seen & FORKING != 0 {
                futex::wait(&self.state, seen);
            } else if self
                .state
                .compare_exchange_weak(seen, change(seen), Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                return;
            }
        }
    }

    /// Before a fork: closes the gate and waits until it is empty.
    pub(super) fn prepare(&self) {
        if in_task() {
            return;
        }
        self.change_unless_forking(|state| state | FORKING);
        loop {
            let seen = self.state.load(Ordering::Acquire);
            if seen == FORKING {
                return;
            }
            futex::wait(&self.state, seen);
        }
    }

    /// After a fork, in the parent: opens the gate.
    pub(super) fn after_in_parent(&self) {
        if !in_task() {
            self.state.fetch_and(!FORKING, Ordering::Release);
            futex::wake_all(&self.state);
        }
    }

    /// After a fork, in the child: an empty gate, and threads of a new generation.
    pub(super) fn after_in_child(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        self.state.store(0, Ordering::Release);
    }
}

/// Registers the handlers, once per process image.
pub(in crate::host) fn register() -> Result<()> {
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
    GATE.prepare();
}

extern "C" fn parent() {
    GATE.after_in_parent();
}

extern "C" fn child() {
    GATE.after_in_child();
}
