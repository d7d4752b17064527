//! Threads of this process that move things on and mostly wait: for a device, for a drive, for the
//! workers. Whatever needs one from time to time is a [`Task`], and has it only then. So their
//! number follows what goes on at once, and not how many engines there are.
//!
//! - EXEC-1 After [`Executor::wake`] a task is run once more, by one thread at a time. What the
//!   waker has done before, that run sees.
//! - EXEC-2 Tasks are run in the order in which they were woken. One that is woken while it runs is
//!   run again, behind those that wait.
//! - EXEC-3 A task waits for others of its role until [`Executor::relieve`] is called. Who waits
//!   for what a task does calls it every [`PATIENCE`]. So tasks may wait for what the program does
//!   when another task has run, as those of two engines do whose programs wait for each other.
//! - EXEC-4 After [`Executor::join`] no thread has the task, not even to drop it.
//! - EXEC-5 The threads of a role are started with its first user, in each process of its own after
//!   a fork, and end with the process. One that runs nothing uses no CPU.
//!
//! Cost: two locks per run.

#[cfg(all(test, feature = "shuttle"))]
mod model;

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use super::fork::{self, PerProcess};
use crate::{
    error::{Error, Result},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc, thread},
};

/// What needs a thread from time to time.
pub trait Task: Send + Sync {
    /// Does what there is to do. May wait.
    fn run(&self);
}

/// What threads are for. Tasks of one role never wait for those of a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// They copy host memory, and wait for nothing.
    Lanes,
    /// They hand copies to devices, whose queues may be full.
    Copies,
    /// They move the jobs of engines on.
    Jobs,
}

impl Role {
    const COUNT: usize = 3;

    fn name(self) -> &'static str {
        match self {
            Self::Lanes => "stepwell-lane",
            Self::Copies => "stepwell-issuer",
            Self::Jobs => "stepwell-jobs",
        }
    }

    /// How many threads there are at first, and how many before anything has to wait for one.
    fn threads(self) -> (usize, usize) {
        match self {
            // Both directions at once. Workers wake these tasks, and start no thread for them: it
            // would be on their CPU.
            Self::Lanes => (2, 2),
            Self::Copies => (1, usize::MAX),
            // Those of one device mostly end in the order in which they begin.
            Self::Jobs => (1, 4),
        }
    }
}

/// How long who waits for a task waits before it calls [`Executor::relieve`].
pub const PATIENCE: Duration = Duration::from_millis(50);

/// See the [module](self).
pub struct Executor {
    name: &'static str,
    threads_max: usize,
    state: Mutex<State>,
    /// A task waits for a thread.
    woken: Condvar,
    /// A run has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<dyn Task>>,
    running: Vec<Running>,
    threads: usize,
    quit: bool,
}

/// A task that a thread runs.
struct Running {
    address: usize,
    is_woken: bool,
}

fn address_of(task: &Arc<dyn Task>) -> usize {
    Arc::as_ptr(task).addr()
}

impl State {
    fn has_too_few_threads(&self) -> bool {
        self.queue.len() + self.running.len() > self.threads
    }

    fn is_queued(&self, address: usize) -> bool {
        self.queue.iter().any(|task| address_of(task) == address)
    }

    fn running(&self, address: usize) -> Option<usize> {
        self.running.iter().position(|one| one.address == address)
    }
}

impl Executor {
    /// Those of this process, started on first use.
    ///
    /// # Errors
    /// [`Error::Os`] where a thread cannot be started.
    pub fn of_process(role: Role) -> Result<&'static Self> {
        static MADE: [PerProcess<Executor>; Role::COUNT] = [const { PerProcess::new() }; _];
        fork::register()?;
        let _entered = fork::enter();
        let (at_first, threads_max) = role.threads();
        MADE[role as usize].get_or_make(|| Self::start(role.name(), at_first, threads_max))
    }

    /// With `at_first` threads, and up to `threads_max` before anything has to wait for one.
    pub(crate) fn start(
        name: &'static str,
        at_first: usize,
        threads_max: usize,
    ) -> Result<&'static Self> {
        let executor: &'static Self = Box::leak(Box::new(Self {
            name,
            threads_max,
            state: Mutex::default(),
            woken: Condvar::new(),
            ended: Condvar::new(),
        }));
        for _ in 0..at_first {
            executor.lock().threads += 1;
            executor.spawn()?;
        }
        Ok(executor)
    }

    /// Has a thread run the task.
    pub fn wake(&'static self, task: &Arc<dyn Task>) {
        let mut state = self.lock();
        let address = address_of(task);
        if let Some(at) = state.running(address) {
            state.running[at].is_woken = true;
        } else if !state.is_queued(address) {
            state.queue.push_back(Arc::clone(task));
            if state.has_too_few_threads() && state.threads < self.threads_max {
                self.grow(state);
            } else {
                drop(state);
                self.woken.notify_one();
            }
        }
    }

    /// Has one more thread run tasks, where one waits for those that there are.
    pub fn relieve(&'static self) {
        let state = self.lock();
        if state.has_too_few_threads() {
            self.grow(state);
        }
    }

    /// Waits until no thread has the task, and none will run it that is not woken again.
    pub fn join(&'static self, task: &Arc<dyn Task>) {
        let address = address_of(task);
        let is_there =
            |state: &mut State| state.is_queued(address) || state.running(address).is_some();
        loop {
            let (mut state, _) = self
                .ended
                .wait_timeout_while(self.lock(), PATIENCE, is_there)
                .unwrap_or_else(PoisonError::into_inner);
            if !is_there(&mut state) {
                return;
            }
            drop(state);
            self.relieve();
        }
    }

    /// Starts one more thread. Where that fails, tasks wait for those that there are.
    fn grow(&'static self, mut state: MutexGuard<'_, State>) {
        state.threads += 1;
        drop(state);
        let _entered = fork::enter();
        let _ = self.spawn();
    }

    /// Starts a thread that is counted already, and waits until it has begun: one that begins holds
    /// a lock of Rust's runtime, for which a forked child would wait. Called inside the gate.
    fn spawn(&'static self) -> Result<()> {
        let (begun, has_begun) = mpsc::channel();
        let started = thread::Builder::new().name(self.name.to_owned()).spawn(move || {
            // Only fails where nobody waits.
            let _ = begun.send(());
            drop(begun);
            self.work();
        });
        match started {
            Ok(_) => {
                let _ = has_begun.recv();
                Ok(())
            }
            Err(error) => {
                self.lock().threads -= 1;
                let name = self.name;
                Err(Error::os(
                    format!("cannot start the thread `{name}`; hint: see `ulimit -u`"),
                    error,
                ))
            }
        }
    }

    /// A thread's life.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            let Some(task) = state.queue.pop_front() else {
                if state.quit {
                    return;
                }
                state = self.woken.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let address = address_of(&task);
            state.running.push(Running { address, is_woken: false });
            drop(state);
            // Tasks say themselves what has gone wrong.
            let _ = catch_unwind(AssertUnwindSafe(|| task.run()));
            state = self.lock();
            let is_woken =
                state.running(address).is_some_and(|at| state.running.swap_remove(at).is_woken);
            if is_woken {
                state.queue.push_back(task);
            } else {
                drop(task);
            }
            self.ended.notify_all();
        }
    }

    /// Ends the threads: the model's have to.
    #[cfg(all(test, feature = "shuttle"))]
    pub(crate) fn quit(&self) {
        self.lock().quit = true;
        self.woken.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
