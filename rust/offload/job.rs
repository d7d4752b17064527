//! A job: one optimizer step, from its first gradient to its last weight.
//!
//! ```text
//!             submit            last chunk         tier's commit        last upload
//! Announced ----------> Decided ----------> Stepped ----------> Committed ----------> Uploaded
//!     '--> discarded                 (busy until here) ---------------'
//! ```
//!
//! - JOB-1 A job is announced by the first gradient that is taken for it. The caller decides: it
//!   submits the job, with the scale of its gradients in the updates' hyper-parameters, or discards
//!   it. Of both, and of taking, one happens at a time ([`Engine`](super::Engine) has the lock).
//! - JOB-2 From then on one place moves it on ([`Jobs::advance`]), on a thread of the process, and
//!   one job after the other: a job begins when the one before is uploaded. One that no thread has
//!   come to begins soon after somebody waits for it.
//! - JOB-3 A job is busy until it is committed: until then no other is submitted. What it steps is
//!   on its way up then, and no gradient of it is read any more.
//! - JOB-4 What a job has borrowed is held until it is uploaded. What a deferred job has borrowed
//!   is held until the jobs that step and upload the last of it are. Where one fails, until the
//!   engine is dropped, which waits for the device.
//! - JOB-5 The first failure, or panic, is the last: every call that waits for jobs, submits one,
//!   or takes a gradient gets the error. The engine is busy from then on.
//!
//! Cost: two locks per state, and one per upload. Two jobs may live at once, one of them on its way
//! up. So there are two lists of updates, which all jobs use.

use std::{collections::VecDeque, time::Duration};

use super::{owners::Owners, panics::caught};
use crate::{
    adam::{Hyper, tensor::AdamTensor},
    error::{Error, Result},
    host::executor::{Executor, PATIENCE},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// One tensor of a step.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Which of the engine's tensors.
    pub index: usize,
    /// Its host side, with the gradient.
    pub tensor: AdamTensor,
    /// Where its new weight goes, in device memory; None: it stays in the host memory that it is
    /// written to.
    pub weight: Option<u64>,
    /// Whether it is stepped and lands with its own job, also where that is deferred.
    pub is_at_once: bool,
    /// The number of this update, from 1.
    pub count: u64,
    /// What to step it with.
    pub hyper: Hyper,
}

/// What becomes of a job's gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// All that is pending is stepped, with these, and all weights land.
    Whole,
    /// One group of segments has its turn, with what is pending of it. Its weights land with the
    /// next job.
    Deferred {
        /// By how many updates the weights that land run ahead along the momentum; 0: by none.
        predicted_updates: f32,
    },
}

/// What the last step took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// From the first chunk to the last.
    pub step: Duration,
    /// The part of it that the worker that waited longest has waited for gradients.
    pub gradients: Duration,
    /// How many steps before the last one the oldest gradient came that no turn has applied.
    pub oldest_age: u64,
    /// Bytes of gradients that were taken for it.
    pub bytes_downloaded: u64,
    /// Bytes that went up.
    pub bytes_uploaded: u64,
}

/// How far a decided job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(super) enum Phase {
    /// It is to be stepped.
    Decided,
    /// All its chunks are stepped.
    Stepped,
    /// Its new state is the state, and all its uploads are enqueued.
    Committed,
    /// All its uploads have ended.
    Uploaded,
}

/// A job that is announced: gradients are taken for it.
pub(super) struct Announced {
    /// The number of the generation that they fill.
    pub(super) generation: usize,
}

/// A job that is decided.
pub(super) struct Job {
    /// The number of the generation that it adds; None: it steps what is pending.
    pub(super) generation: Option<usize>,
    pub(super) kind: Kind,
    pub(super) updates: Vec<Update>,
    /// Of how many jobs, this one included, what was lent stays when it is over.
    pub(super) holds: usize,
    /// What is lent for the updates.
    owners: Option<Owners>,
}

/// A job that is busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Busy {
    /// The number of the generation that it reads, if it has one.
    pub(super) generation: Option<usize>,
}

impl Busy {
    fn of(job: &Job) -> Self {
        Self { generation: job.generation }
    }
}

/// What it takes to move a job on; each may block as long as it takes.
pub(super) trait Work {
    /// Steps all of it.
    fn step(&mut self, job: &Job) -> Result<Timing>;
    /// Makes its new state the state, and enqueues what uploads are left. Gives back what was lent
    /// for its gradients: nothing reads them any more.
    fn commit(&mut self, job: &Job) -> Result<()>;
    /// Waits until its uploads have ended.
    fn upload(&mut self) -> Result<()>;
}

/// The jobs of an engine, and what callers learn of them. See the [module](self).
pub(super) struct Jobs {
    /// Its threads move them on.
    executor: &'static Executor,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Submitted and not yet begun.
    next: Option<Job>,
    /// Of the job that was begun last.
    begun: Option<(Phase, Busy)>,
    failure: Option<String>,
    timing: Timing,
    /// Whether jobs wait for [`Jobs::let_begin`]; and whether the one that was submitted may begin.
    holds_jobs: bool,
    may_begin: bool,
    /// Of jobs that are over, whose memory later ones use; the oldest first.
    held: VecDeque<Option<Owners>>,
    /// Of jobs that are over.
    returned: Vec<Owners>,
    /// Lists for the updates of jobs to come, empty.
    spare_updates: Vec<Vec<Update>>,
    /// Of the job that has failed.
    kept: Option<Job>,
}

impl State {
    fn busy(&self) -> Option<Busy> {
        let begun = self.begun.filter(|&(phase, _)| phase < Phase::Committed);
        self.next.as_ref().map(Busy::of).or(begun.map(|(_, busy)| busy))
    }

    fn check(&self) -> Result<()> {
        match &self.failure {
            Some(failure) => Err(Error::os(
                "a step failed half-way, so parameters and state may be those of no step; \
                 hint: go on from a checkpoint, or from the last step that a volume has committed",
                std::io::Error::other(failure.as_str()),
            )),
            None => Ok(()),
        }
    }
}

impl Jobs {
    /// Without any. A job has up to `tensors` updates.
    pub(super) fn new(tensors: usize, executor: &'static Executor) -> Self {
        // A job that is on its way up, and the next.
        let spare_updates = vec![Vec::with_capacity(tensors), Vec::with_capacity(tensors)];
        Self {
            executor,
            state: Mutex::new(State { spare_updates, ..State::default() }),
            changed: Condvar::new(),
        }
    }

    /// The job that is busy, if one is.
    ///
    /// # Errors
    /// [`Error::Os`] where a job has failed.
    pub(super) fn busy(&self) -> Result<Option<Busy>> {
        let state = self.lock();
        state.check().map(|()| state.busy())
    }

    /// As [`Jobs::busy`], without a look at failures.
    pub(super) fn is_busy(&self) -> bool {
        self.lock().busy().is_some()
    }

    /// Checks that a job may be submitted.
    ///
    /// # Errors
    /// [`Error::Value`] where one is busy; [`Error::Os`] where one has failed.
    pub(super) fn check_idle(&self) -> Result<()> {
        match self.busy()? {
            None => Ok(()),
            Some(_) => {
                Err(Error::value("a step is still running, expected it to be finished first"))
            }
        }
    }

    /// Hands a job over, where [`Jobs::check_idle`] allows it and no other thread submits, for
    /// [`Jobs::advance`]. When it is over, what was lent for the last `holds` jobs stays.
    pub(super) fn submit(
        &self,
        announced: Option<Announced>,
        kind: Kind,
        updates: &[Update],
        owners: Option<Owners>,
        holds: usize,
    ) {
        let mut state = self.lock();
        let mut list = state.spare_updates.pop().unwrap_or_default();
        list.extend_from_slice(updates);
        let generation = announced.map(|Announced { generation }| generation);
        state.next = Some(Job { generation, kind, updates: list, owners, holds });
        state.may_begin = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Jobs that are submitted from now on begin with [`Jobs::let_begin`].
    pub(super) fn hold(&self) {
        self.lock().holds_jobs = true;
    }

    /// Has the job that was submitted begin.
    pub(super) fn let_begin(&self) {
        self.lock().may_begin = true;
        self.changed.notify_all();
    }

    /// Whether a job that was submitted waits for [`Jobs::let_begin`].
    pub(super) fn is_held(&self) -> bool {
        let state = self.lock();
        state.holds_jobs && !state.may_begin && state.next.is_some()
    }

    /// Something has failed half-way that is no job's: every call gets the error from now on.
    /// Returns it as they do.
    pub(super) fn fail(&self, error: Error) -> Error {
        let mut state = self.lock();
        state.failure.get_or_insert(error.to_string());
        let failed = state.check().err();
        drop(state);
        self.changed.notify_all();
        failed.unwrap_or(error)
    }

    /// Has threads that wait look again: something that they wait for has changed.
    pub(super) fn notify(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Waits, no longer than `timeout`, until no job is busy; whether that was reached.
    ///
    /// # Errors
    /// [`Error::Os`] where a job has failed.
    pub(super) fn wait_until_idle(&self, timeout: Duration) -> Result<bool> {
        self.wait_while(timeout, |state| state.busy().is_some())
    }

    /// Waits, no longer than `timeout`, until the last job is uploaded; whether that was reached.
    ///
    /// # Errors
    /// [`Error::Os`] where a job has failed.
    pub(super) fn wait_until_over(&self, timeout: Duration) -> Result<bool> {
        self.wait_while(timeout, |state| {
            state.next.is_some() || state.begun.is_some_and(|(phase, _)| phase < Phase::Uploaded)
        })
    }

    /// Waits, no longer than `timeout`, until `is_there`, which a [`Jobs::notify`] follows; whether
    /// that was reached.
    ///
    /// # Errors
    /// [`Error::Os`] where a job has failed.
    pub(super) fn wait_until(
        &self,
        timeout: Duration,
        is_there: impl Fn() -> bool,
    ) -> Result<bool> {
        self.wait_while(timeout, |_| !is_there())
    }

    fn wait_while(&self, timeout: Duration, waiting: impl Fn(&State) -> bool) -> Result<bool> {
        let mut left = timeout;
        loop {
            let slice = left.min(PATIENCE);
            let (state, _) = self
                .changed
                .wait_timeout_while(self.lock(), slice, |state| {
                    state.failure.is_none() && waiting(state)
                })
                .unwrap_or_else(PoisonError::into_inner);
            let is_reached = state.check().map(|()| !waiting(&state));
            drop(state);
            if !matches!(is_reached, Ok(false)) {
                return is_reached;
            }
            if slice == PATIENCE {
                // The job may wait for a thread, and those for what comes after this call.
                self.executor.relieve();
            }
            left -= slice;
            if left.is_zero() {
                return is_reached;
            }
        }
    }

    /// What the last step took.
    pub(super) fn timing(&self) -> Timing {
        self.lock().timing
    }

    /// Gathers what was lent and `let_go` moves here.
    pub(super) fn give_back(&self, let_go: impl FnOnce(&mut Vec<Owners>)) {
        let_go(&mut self.lock().returned);
    }

    /// Something that was lent, and is not used any more.
    pub(super) fn pop_returned(&self) -> Option<Owners> {
        self.lock().returned.pop()
    }

    /// Moves the job on that was submitted last, to its end, unless one has failed. Not on two
    /// threads at once.
    pub(super) fn advance(&self, work: &mut dyn Work) {
        if let Some(job) = self.begin() {
            let moved = caught("a worker", || {
                let timing = work.step(&job)?;
                self.reach(Phase::Stepped, |state| state.timing = timing);
                work.commit(&job)?;
                self.reach(Phase::Committed, |_| ());
                work.upload()
            });
            match moved {
                Ok(()) => self.reach(Phase::Uploaded, |state| {
                    let Job { mut updates, owners, holds, .. } = job;
                    updates.clear();
                    state.spare_updates.push(updates);
                    state.held.push_back(owners);
                    while state.held.len() > holds {
                        let oldest = state.held.pop_front().flatten();
                        state.returned.extend(oldest);
                    }
                }),
                Err(error) => {
                    let mut state = self.lock();
                    state.failure = Some(error.to_string());
                    state.kept = Some(job);
                    drop(state);
                    self.changed.notify_all();
                }
            }
        }
    }

    fn begin(&self) -> Option<Job> {
        let mut state = self.lock();
        if state.kept.is_some() || (state.holds_jobs && !state.may_begin) {
            return None;
        }
        let job = state.next.take()?;
        state.begun = Some((Phase::Decided, Busy::of(&job)));
        Some(job)
    }

    fn reach(&self, phase: Phase, and: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        if let Some((reached, _)) = &mut state.begun {
            *reached = phase;
        }
        and(&mut state);
        drop(state);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
