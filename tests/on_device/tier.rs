//! A tier that is watched.

use std::sync::{
    Condvar, Mutex,
    atomic::{AtomicBool, Ordering},
};

use stepwell::{
    Error, Result,
    adam::tensor::AdamTensor,
    state::chunk::Chunk,
    stream::view::Route,
    tier::{Run, Stored, Tier, ram::Ram},
};

use super::SOON;

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
    Fetch(Run),
    Route(Chunk),
    Store(Run),
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
    fn fetch(&self, run: &Run) -> Result<()> {
        self.log(Asked::Fetch(run.clone()));
        if !self.is_commit_held.load(Ordering::Relaxed) { self.wait() } else { Ok(()) }
    }

    fn route(&self, tensor: &AdamTensor, chunk: Chunk) -> AdamTensor<Route> {
        self.log(Asked::Route(chunk));
        Ram.route(tensor, chunk)
    }

    fn store(&self, run: &Run) -> Result<Stored> {
        self.log(Asked::Store(run.clone()));
        Ok(if self.commits_late { Stored::WithCommit } else { Stored::Final })
    }

    fn commit(&self) -> Result<()> {
        self.log(Asked::Commit);
        self.wait()
    }
}
