//! What comes down from the device: a queue, and the thread that hands it over.
//!
//! - DOWN-1 Entries are handed over one by one, in the order in which they were queued. Queueing
//!   waits for nothing.
//! - DOWN-2 An entry has a ticket, from 1. An event says something about it only once it is issued,
//!   that is handed over: whoever waits for the event waits for the ticket first.
//! - DOWN-3 No more than [`IN_FLIGHT`] copies are with the device. Its own queue is so never full,
//!   and nobody else who uses the device is held up.
//! - DOWN-4 The first entry that fails, or panics, is the last: what is queued is dropped, and
//!   everybody who waits for it, now or later, or queues more, gets the error.
//!
//! Cost: an entry is 40 bytes, and a step queues one per segment, so the queue is bounded by the
//! model; two locks per entry.

use std::{collections::VecDeque, time::Duration};

use super::thread::caught;
use crate::{
    device::{Device, Lane, Mark},
    error::{Error, Result},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// Copies that are with the device at once: of whole segments 64 MB, a millisecond of the bus, so
/// that it does not run dry while the thread that hands over the next wakes.
pub const IN_FLIGHT: usize = 8;

/// An entry of the queue.
pub(super) enum Download {
    /// Whatever is queued later comes after what was marked.
    After(Mark),
    /// A copy to the host, and the event behind it; None for one of [`Downloads::new`]'s.
    Copy { source: u64, target: usize, nbytes: usize, event: Option<usize> },
    /// An event behind all that was queued earlier.
    Record(usize),
}

/// See the [module](self).
pub(super) struct Downloads {
    device: Arc<dyn Device>,
    first_event: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Download>,
    /// The last ticket that was given out.
    queued: u64,
    /// The last ticket that was handed over.
    issued: u64,
    failure: Option<String>,
    quit: bool,
}

impl State {
    fn is_pending(&self, ticket: u64) -> bool {
        self.issued < ticket && self.failure.is_none()
    }

    fn check(&self) -> Result<()> {
        match &self.failure {
            Some(failure) => Err(Error::os(
                "copies to the host have failed",
                std::io::Error::other(failure.as_str()),
            )),
            None => Ok(()),
        }
    }
}

impl Downloads {
    /// An empty queue, which nobody hands over yet. Events `first_event` and [`IN_FLIGHT`] - 1 more
    /// of `device` are its own.
    pub(super) fn new(device: Arc<dyn Device>, first_event: usize) -> Self {
        Self { device, first_event, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Queues entries in this order. The ticket of the first; the others' follow.
    ///
    /// # Safety
    /// Both sides of every copy are alive, nobody writes its source nor uses its target, until it
    /// is done.
    ///
    /// # Errors
    /// [`Error::Os`] where an earlier entry has failed.
    pub(super) unsafe fn push(&self, entries: impl IntoIterator<Item = Download>) -> Result<u64> {
        let mut state = self.lock();
        state.check()?;
        let (first, before) = (state.queued + 1, state.queue.len());
        state.queue.extend(entries);
        state.queued += (state.queue.len() - before) as u64;
        drop(state);
        self.changed.notify_all();
        Ok(first)
    }

    /// Checks that nothing has failed.
    ///
    /// # Errors
    /// [`Error::Os`] where something has.
    pub(super) fn check(&self) -> Result<()> {
        self.lock().check()
    }

    /// Waits until the entry with this ticket, and all before it, are issued.
    ///
    /// # Errors
    /// [`Error::Os`] where they never will be.
    pub(super) fn wait(&self, ticket: u64) -> Result<()> {
        let pending = |state: &mut State| state.is_pending(ticket);
        let state =
            self.changed.wait_while(self.lock(), pending).unwrap_or_else(PoisonError::into_inner);
        if state.issued < ticket { state.check() } else { Ok(()) }
    }

    /// As [`Downloads::wait`], no longer than `timeout`; whether that was reached.
    ///
    /// # Errors
    /// As [`Downloads::wait`].
    pub(super) fn wait_timeout(&self, ticket: u64, timeout: Duration) -> Result<bool> {
        let pending = |state: &mut State| state.is_pending(ticket);
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), timeout, pending)
            .unwrap_or_else(PoisonError::into_inner);
        if state.issued < ticket { state.check().map(|()| false) } else { Ok(true) }
    }

    /// Waits until all that is queued is issued.
    ///
    /// # Errors
    /// As [`Downloads::wait`].
    pub(super) fn wait_for_all(&self) -> Result<()> {
        let queued = self.lock().queued;
        self.wait(queued)
    }

    /// Ends [`Downloads::hand_over`] when all that is queued is issued.
    pub(super) fn quit(&self) {
        self.lock().quit = true;
        self.changed.notify_all();
    }

    /// The thread's life. It ends with [`Downloads::quit`], or the first failure.
    pub(super) fn hand_over(&self) {
        let Err(error) = caught("the thread that hands over copies", || self.hand_over_all())
        else {
            return;
        };
        let mut state = self.lock();
        state.failure = Some(error.to_string());
        state.queue.clear();
        drop(state);
        self.changed.notify_all();
    }

    fn hand_over_all(&self) -> Result<()> {
        self.device.attach()?;
        // The events of copies that may not be done, the oldest first.
        let mut in_flight = VecDeque::with_capacity(IN_FLIGHT);
        let mut num_own = 0;
        loop {
            let idle = |state: &mut State| !state.quit && state.queue.is_empty();
            let mut state =
                self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
            let Some(entry) = state.queue.pop_front() else { return Ok(()) };
            drop(state);
            match entry {
                Download::After(mark) => self.device.order_lane_after(Lane::Download, mark)?,
                Download::Copy { source, target, nbytes, event } => {
                    if in_flight.len() == IN_FLIGHT
                        && let Some(oldest) = in_flight.pop_front()
                    {
                        self.device.wait(oldest)?;
                    }
                    let target = std::ptr::with_exposed_provenance_mut::<u8>(target);
                    // SAFETY: whoever queued it vouches for both sides.
                    unsafe { self.device.copy(Lane::Download, source, target, nbytes)? };
                    let event = event.unwrap_or_else(|| {
                        // When it comes round, so many later copies have pushed it out.
                        num_own += 1;
                        self.first_event + num_own % IN_FLIGHT
                    });
                    self.device.record(Lane::Download, event)?;
                    in_flight.push_back(event);
                }
                Download::Record(event) => self.device.record(Lane::Download, event)?,
            }
            self.lock().issued += 1;
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
