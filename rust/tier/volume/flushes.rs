//! Flushes of what a step has written so far, while it goes on: so its commit has little to wait
//! for.
//!
//! A member is due for one when so many bytes were given to it since its last one, and that has
//! ended. What it covers is not known: writes may be under way. The commit's own flush has the
//! rest.
//!
//! - FLU-1 A flush that fails says so once, and the next one succeeds. So a commit waits for all
//!   that were begun since the one before, and fails with the first of them that has failed.
//!
//! Cost: one lock for each piece of a record that is written.

use std::sync::{Arc, Mutex};

use super::request::Request;
use crate::tier::io::queue::lock;

/// Of one member.
#[derive(Default)]
struct Member {
    /// Bytes that were given to it since its last flush.
    nbytes: u64,
    /// Its flushes since the last commit.
    begun: Vec<Arc<Request>>,
}

/// See the [module](self).
pub(super) struct Flushes {
    interval_bytes: u64,
    members: Mutex<Vec<Member>>,
}

impl Flushes {
    /// One each `interval_bytes`.
    pub(super) fn new(num_members: usize, interval_bytes: u64) -> Self {
        let members = Mutex::new((0..num_members).map(|_| Member::default()).collect());
        Self { interval_bytes, members }
    }

    /// The member was given so many bytes to write: begins a flush by `begin` if one is due.
    pub(super) fn note_write(
        &self,
        member: usize,
        nbytes: u64,
        begin: impl FnOnce() -> Arc<Request>,
    ) {
        let of = &mut lock(&self.members)[member];
        of.nbytes += nbytes;
        if of.nbytes >= self.interval_bytes && of.begun.last().is_none_or(|last| last.is_over()) {
            of.nbytes = 0;
            of.begun.push(begin());
        }
    }

    /// All that were begun since this was called before, each to be waited for.
    pub(super) fn take(&self) -> Vec<Arc<Request>> {
        lock(&self.members)
            .iter_mut()
            .flat_map(|member| {
                member.nbytes = 0;
                std::mem::take(&mut member.begun)
            })
            .collect()
    }
}
