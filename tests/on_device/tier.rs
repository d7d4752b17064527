//! A tier that is watched.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use stepwell::{
    Error, Result,
    adam::tensor::AdamTensor,
    state::chunk::Chunk,
    stream::view::Route,
    tier::{Planned, Stored, Tier, ram::Ram},
};

use super::{
    SOON,
    locks::{Condvar, Mutex},
};

/// Keeps state in the tensors, as [`Ram`], but may hold fetches back, and may make what is stored
/// final with the commit only. It logs what is asked of it.
#[derive(Default)]
pub(crate) struct Watched {
    commits_late: bool,
    is_held: Mutex<bool>,
    changed: Condvar,
    pub(crate) is_commit_held: AtomicBool,
    pub(crate) asked: Mutex<Vec<Asked>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Asked {
    /// Of these chunks of these tensors.
    Begin(Vec<(usize, Range<usize>)>),
    Fetch(Chunk),
    Store(Chunk),
    Commit,
}

impl Watched {
    /// One of which what is stored is final with the commit only.
    pub(crate) fn committing_late() -> Self {
        Self { commits_late: true, ..Self::default() }
    }

    pub(crate) fn hold(&self, held: bool) {
        *self.is_held.lock().expect("no panic") = held;
        self.changed.notify_all();
    }

    fn log(&self, asked: Asked) {
        self.asked.lock().expect("no panic").push(asked);
    }

    fn wait(&self) -> Result<()> {
        let held = self.is_held.lock().expect("no panic");
        let (held, _) =
            self.changed.wait_timeout_while(held, SOON, |held| *held).expect("no panic");
        if *held { Err(Error::value("the test has not let the tier go on")) } else { Ok(()) }
    }
}

// SAFETY: it routes as `Ram`.
unsafe impl Tier for Watched {
    fn begin(&self, runs: &mut dyn Iterator<Item = Planned<'_>>) -> Result<()> {
        self.log(Asked::Begin(runs.map(|run| (run.tensor, run.begin..run.end)).collect()));
        Ok(())
    }

    fn fetch(&self, tensor: &AdamTensor, chunk: Chunk) -> Result<AdamTensor<Route>> {
        self.log(Asked::Fetch(chunk));
        if !self.is_commit_held.load(Ordering::Relaxed) {
            self.wait()?;
        }
        Ram.fetch(tensor, chunk)
    }

    fn store(&self, _: &AdamTensor, chunk: Chunk) -> Result<Stored> {
        self.log(Asked::Store(chunk));
        Ok(if self.commits_late { Stored::WithCommit } else { Stored::Final })
    }

    fn is_at_home(&self, _: usize) -> bool {
        true
    }

    fn commit(&self) -> Result<()> {
        self.log(Asked::Commit);
        self.wait()
    }
}
