//! What lands with a job is handed to the device a few segments at a time.
//!
//! A device takes the copies of one direction in the order in which it was handed them. The program
//! copies as well: its next batch, between a step and the forward. Behind all that lands that copy
//! would wait for up to a whole model (45 ms for 1.2 B parameters), and the forward with it.
//!
//! - HAND-1 No more than [`LANDINGS_IN_FLIGHT_MAX`] landings are with the device. So a copy of the
//!   program waits for those only: less than a millisecond.
//! - HAND-2 One worker hands over, in the order of the list, before it steps anything. It sleeps
//!   most of that time, so the pass takes a hundredth longer.
//! - HAND-3 A worker that writes memory that a landing reads waits until that one is handed over,
//!   and then for its upload.

use super::{pending::Landing, uploads::Uploads};
use crate::{
    error::{Error, Result},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// Of at most 4 Mi elements each.
pub const LANDINGS_IN_FLIGHT_MAX: usize = 4;

/// The landings of one job on their way to the device.
pub(super) struct Handover<'a> {
    landings: &'a [Landing],
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// How many the device has been handed.
    count: usize,
    /// No more will be.
    is_closed: bool,
}

impl<'a> Handover<'a> {
    pub(super) fn new(landings: &'a [Landing]) -> Self {
        Self { landings, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Hands over all of them by `enqueue`. Waits for `uploads` that are in flight.
    ///
    /// # Errors
    /// Those of `enqueue`; [`Error::Os`] where the device has failed.
    pub(super) fn hand_over(
        &self,
        uploads: &Uploads,
        enqueue: impl Fn(&Landing) -> Result<()>,
    ) -> Result<()> {
        for (index, landing) in self.landings.iter().enumerate() {
            if let Some(before) = index.checked_sub(LANDINGS_IN_FLIGHT_MAX) {
                uploads.wait_for(self.landings[before].segment)?;
            }
            enqueue(landing)?;
            self.lock().count = index + 1;
            self.changed.notify_all();
        }
        Ok(())
    }

    /// When it is dropped, nothing more is handed over: all was, or the worker has failed.
    pub(super) fn closing(&self) -> Closing<'_> {
        Closing(self)
    }

    /// Waits until the upload of the last landing for which `reads` holds has ended. Uploads end in
    /// their order.
    ///
    /// # Errors
    /// [`Error::Os`] where it was not handed over, or the device has failed.
    pub(super) fn wait_for_last(
        &self,
        uploads: &Uploads,
        reads: impl Fn(&Landing) -> bool,
    ) -> Result<()> {
        let Some(index) = self.landings.iter().rposition(reads) else { return Ok(()) };
        let waiting = |state: &mut State| state.count <= index && !state.is_closed;
        let state =
            self.changed.wait_while(self.lock(), waiting).unwrap_or_else(PoisonError::into_inner);
        if state.count <= index {
            return Err(Error::os("a weight did not land", std::io::ErrorKind::Other));
        }
        drop(state);
        uploads.wait_for(self.landings[index].segment)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Handover::closing`]. A panic drops it as well, so that no other worker waits for ever.
pub(super) struct Closing<'a>(&'a Handover<'a>);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.changed.notify_all();
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use super::*;
    use crate::{
        device::{Device, Lane, host::HostDevice},
        offload::segment::Segments,
        sync::Arc,
    };

    const fn landing(at: usize) -> Landing {
        Landing { tensor: at, segment: at, predicted: None }
    }

    // A worker that waits for ever stays behind, and so do these.
    static LANDINGS: [Landing; 3] = [landing(0), landing(1), landing(2)];

    /// What a worker is told that waits for the last of three landings, of which the device has
    /// been handed none or all.
    fn told(all: bool, closes: bool) -> Result<()> {
        let device = Arc::new(HostDevice::new(4).expect("a device"));
        let segments = Segments::new(&[1; 3]);
        let uploads = Uploads::new(Arc::clone(&device) as Arc<dyn Device>, &segments, 0);
        let handover = Handover::new(&LANDINGS);
        if all {
            let record = |landing: &Landing| device.record(Lane::Upload, landing.segment);
            handover.hand_over(&uploads, record).expect("a device that works");
        }
        if closes {
            drop(handover.closing());
        }
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(handover.wait_for_last(&uploads, |_| true)));
        receiver.recv_timeout(Duration::from_secs(20)).expect("an answer")
    }

    #[test]
    fn a_worker_does_not_wait_for_what_is_never_handed_over() {
        let said = told(false, true).expect_err("it has not landed").to_string();
        assert!(said.contains("a weight did not land"), "{said}");
    }

    #[test]
    fn a_worker_waits_for_its_landing_and_not_for_those_behind_it() {
        told(true, false).expect("it has landed");
        told(true, true).expect("it has landed");
    }
}
