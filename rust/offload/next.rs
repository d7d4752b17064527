//! The job that comes next, as callers fill it. It is behind a lock: of taking, submitting and
//! discarding, one happens at a time.

use super::{checks::Checks, job::Announced};

/// What callers' threads share of the job that comes next.
pub(super) struct Next {
    /// The job that gradients have been taken for.
    pub(super) announced: Option<Announced>,
    /// The generation that was submitted last.
    pub(super) submitted: Option<usize>,
    /// For each generation the ticket of its last discard, while copies of that may be under way
    /// and it has not been used again.
    pub(super) discarded: Box<[Option<u64>]>,
    pub(super) checks: Checks,
}

/// A discard that is to be waited for: [`Engine::discard`] gives it out.
///
/// [`Engine::discard`]: super::Engine::discard
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discarded {
    pub(super) generation: usize,
    /// Of the event behind all of it.
    pub(super) ticket: u64,
}

/// Copies that a stream is to come after: [`Engine::order_after_copies`] knows them by it.
///
/// [`Engine::order_after_copies`]: super::Engine::order_after_copies
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    pub(super) generation: usize,
    /// Of the event behind them.
    pub(super) ticket: u64,
}

impl Next {
    /// Nothing was taken, by an engine of so many generations and tensors.
    pub(super) fn new(generations: usize, tensors: usize) -> Self {
        Self {
            announced: None,
            submitted: None,
            discarded: vec![None; generations].into(),
            checks: Checks::new(tensors),
        }
    }

    /// A generation is filled or submitted. What was lent for a discard of it that no thread has
    /// waited for comes back with what is lent now.
    pub(super) fn reuse(&mut self, generation: usize) {
        self.discarded[generation] = None;
    }

    /// The last of the discards that are to be waited for.
    pub(super) fn last_discarded(&self) -> Option<Discarded> {
        let of = |(generation, ticket): (usize, &Option<u64>)| {
            ticket.map(|ticket| Discarded { generation, ticket })
        };
        self.discarded.iter().enumerate().filter_map(of).max_by_key(|one| one.ticket)
    }
}
