//! What comes down from the device: a queue, whose entries a thread of the process hands to the
//! device.
//!
//! - DOWN-1 Entries are handed over one by one, in the order in which they were queued.
//! - DOWN-2 An entry has a ticket, from 1. It is *issued* once it is handed over. An event says
//!   something about an entry only from then on: a thread that waits for the event waits for the
//!   ticket first.
//! - DOWN-3 No more than [`IN_FLIGHT`] copies are with the device. Its own queue is so never full,
//!   and no other user of the device is held up.
//! - DOWN-4 The first entry that fails, or panics, is the last: what is queued is dropped, and
//!   every thread that waits for it, now or later, or queues more, gets the error.
//! - DOWN-5 The queue holds a fixed number of entries. A thread that finds no room for all of its
//!   entries queues none of them, and waits.
//!
//! - DOWN-6 No queue waits for another engine's: where the device takes no more of one, each other
//!   one that has entries gets a thread of its own.
//!
//! Cost: 40 bytes per place of the queue, allocated with it; two locks per entry.

use std::{collections::VecDeque, time::Duration};

use super::panics::caught;
use crate::{
    device::{Attached, Device, Lane, Mark},
    error::{Error, Result},
    host::executor::{Executor, Task},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// Copies that are with the device at once. Few enough that its queue, of a thousand or so, is
/// never full; enough for the segments of a large embedding, whose gradient is the last, and of the
/// batch before it: the step waits until all copies are handed over.
pub const IN_FLIGHT: usize = if cfg!(feature = "shuttle") { 8 } else { 128 };

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
    capacity: usize,
    /// Its threads hand entries over.
    executor: &'static Executor,
    state: Mutex<State>,
    changed: Condvar,
    in_flight: Mutex<InFlight>,
}

/// What is with the device.
struct InFlight {
    /// The events of copies that may not be done, the oldest first.
    events: VecDeque<usize>,
    num_own: usize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Download>,
    /// The last ticket that was given out.
    queued: u64,
    /// The ticket of the last entry that was handed over.
    issued: u64,
    failure: Option<String>,
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
    /// An empty queue of `capacity` places. Events `first_event` and [`IN_FLIGHT`] - 1 more of
    /// `device` are its own.
    pub(super) fn new(
        device: Arc<dyn Device>,
        first_event: usize,
        capacity: usize,
        executor: &'static Executor,
    ) -> Self {
        let state = State { queue: VecDeque::with_capacity(capacity), ..State::default() };
        let in_flight = InFlight { events: VecDeque::with_capacity(IN_FLIGHT), num_own: 0 };
        Self {
            device,
            first_event,
            capacity,
            executor,
            state: Mutex::new(state),
            changed: Condvar::new(),
            in_flight: Mutex::new(in_flight),
        }
    }

    /// Waits, no longer than `timeout`, until the queue has room for so many entries; whether it
    /// has. It stays while no other thread queues any.
    ///
    /// # Errors
    /// [`Error::Value`] for more entries than there are places; [`Error::Os`] where an earlier
    /// entry has failed.
    pub(super) fn wait_for_room(&self, entries: usize, timeout: Duration) -> Result<bool> {
        if entries > self.capacity {
            return Err(Error::value(format!(
                "`{entries}` copies in one call, expected at most {}\nhint: more calls",
                self.capacity
            )));
        }
        let is_full =
            |state: &State| state.failure.is_none() && state.queue.len() + entries > self.capacity;
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), timeout, |state| is_full(state))
            .unwrap_or_else(PoisonError::into_inner);
        state.check().map(|()| !is_full(&state))
    }

    /// Queues entries in this order, for which there is room. The ticket of the first; the others'
    /// follow.
    ///
    /// # Safety
    /// Until a copy is done, both sides of it are alive. Nothing writes its source, and nothing
    /// else uses its target.
    ///
    /// # Errors
    /// [`Error::Os`] where an earlier entry has failed.
    ///
    /// # Panics
    /// Where there is no room.
    pub(super) unsafe fn push(
        self: &Arc<Self>,
        entries: impl IntoIterator<Item = Download>,
    ) -> Result<u64> {
        let mut state = self.lock();
        state.check()?;
        let first = state.queued + 1;
        for entry in entries {
            assert!(state.queue.len() < self.capacity, "room is waited for");
            state.queue.push_back(entry);
            state.queued += 1;
        }
        drop(state);
        self.executor.wake(&self.task());
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

    /// As [`Downloads::wait_timeout`], for all that is queued.
    ///
    /// # Errors
    /// As [`Downloads::wait`].
    pub(super) fn wait_for_all(&self, timeout: Duration) -> Result<bool> {
        let queued = self.lock().queued;
        self.wait_timeout(queued, timeout)
    }

    /// Waits until all that is queued is issued, or dropped, and no thread has this.
    pub(super) fn join(self: &Arc<Self>) {
        self.executor.join(&self.task());
    }

    fn task(self: &Arc<Self>) -> Arc<dyn Task> {
        Arc::clone(self) as Arc<dyn Task>
    }

    fn hand_over_all(&self) -> Result<()> {
        let _attached = Attached::to(&*self.device)?;
        let mut in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        let InFlight { events, num_own } = &mut *in_flight;
        while let Some(entry) = self.pop() {
            match entry {
                Download::After(mark) => self.device.order_lane_after(Lane::Download, mark)?,
                Download::Copy { source, target, nbytes, event } => {
                    if events.len() == IN_FLIGHT
                        && let Some(oldest) = events.pop_front()
                    {
                        self.device.wait(oldest)?;
                    }
                    let target = std::ptr::with_exposed_provenance_mut::<u8>(target);
                    // SAFETY: `push`'s caller vouches for both sides.
                    unsafe { self.device.copy(Lane::Download, source, target, nbytes)? };
                    let event = event.unwrap_or_else(|| {
                        // When it comes round, so many later copies have pushed it out.
                        *num_own += 1;
                        self.first_event + *num_own % IN_FLIGHT
                    });
                    self.device.record(Lane::Download, event)?;
                    events.push_back(event);
                }
                Download::Record(event) => self.device.record(Lane::Download, event)?,
            }
            self.lock().issued += 1;
            self.changed.notify_all();
        }
        Ok(())
    }

    fn pop(&self) -> Option<Download> {
        self.lock().queue.pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Task for Downloads {
    /// Hands over all that is queued. What has failed is queued no more.
    fn run(&self) {
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
}
