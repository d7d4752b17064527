//! Generations: the gradients of one optimizer step each, on their way to host memory.
//!
//! The memory is the caller's, on both sides. A generation has the tickets and events of the
//! copies, what the caller lent for them, and, with the updates of the step that takes it, the
//! scale of the gradients ([`Hyper::grad_scale`](crate::adam::Hyper)).
//!
//! ```text
//! free --take--> filling --submit--> stepped --commit--> free
//!                  '------discard--------------------------^
//! ```
//!
//! - GEN-1 At most one generation is being filled, and at most one is stepped. An engine that has
//!   two fills one while it steps the other.
//! - GEN-2 A generation that becomes free knows no ticket and owns nothing: what was taken for a
//!   step that was discarded is never stepped.
//! - GEN-3 A segment's gradient that was taken as a whole is waited for by itself. So is one whose
//!   parts are expected: with the last of them all that was queued before is there. Whatever else a
//!   segment needs may lie anywhere in its generation, so all of it is waited for. A part that was
//!   taken may belong to any tensor, so what counted as taken by itself before it does not any
//!   more.

use super::{
    downloads::{Download, Downloads},
    owners::{Lent, Owners},
    segment::Segments,
};
use crate::{
    device::Device,
    error::{Error, Result},
    stream::view::View,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// See the [module](self).
pub(super) struct Generation {
    /// One event per segment, and one for all of it.
    first_event: usize,
    /// For each segment whose gradient was taken or is expected by itself: the ticket of its event.
    /// 0 for others.
    tickets: Box<[AtomicU64]>,
    /// For each tensor whose gradient was taken as a whole: its host memory.
    targets: Mutex<Box<[Option<View>]>>,
    /// The ticket of the event for all of it, once no more is taken.
    sealed: AtomicU64,
    nbytes: AtomicU64,
    /// What keeps the device side alive, and the host side.
    lent: Mutex<[Vec<Owners>; 2]>,
}

impl Generation {
    /// One that is free. Events from `first_event` on are its own.
    pub(super) fn new(segments: &Segments, first_event: usize) -> Self {
        Self {
            first_event,
            tickets: (0..segments.count()).map(|_| AtomicU64::new(0)).collect(),
            targets: Mutex::new(vec![None; segments.tensors()].into_boxed_slice()),
            sealed: AtomicU64::new(0),
            nbytes: AtomicU64::new(0),
            lent: Mutex::default(),
        }
    }

    /// How many events one has.
    pub(super) fn events(segments: &Segments) -> usize {
        segments.count() + 1
    }

    /// The event behind the copy of segment 0, where it was taken by itself; those of the others
    /// follow.
    pub(super) fn first_event(&self) -> usize {
        self.first_event
    }

    /// The event behind all of it.
    pub(super) fn whole_event(&self) -> usize {
        self.first_event + self.tickets.len()
    }

    /// The gradient of `tensor` goes to this host memory as a whole; its segments, and with them
    /// their copies' tickets from `first` on, follow each other.
    pub(super) fn set_taken(&self, segments: &Segments, tensor: usize, host: View, first: u64) {
        self.targets()[tensor] = Some(host);
        for (segment, ticket) in segments.of(tensor).zip(first..) {
            self.tickets[segment].store(ticket, Ordering::Release);
        }
        self.add_nbytes(host.nbytes());
    }

    /// Parts of any tensors' gradients are on their way.
    pub(super) fn set_taken_in_parts(&self, nbytes: usize) {
        self.forget_tickets();
        self.add_nbytes(nbytes);
    }

    /// A part of the gradient of `segment` comes by a copy of the caller's, which is over once the
    /// entry with this ticket is: the segment's event, behind all that was taken before.
    pub(super) fn set_expected(&self, segment: usize, ticket: u64) {
        self.tickets[segment].store(ticket, Ordering::Release);
    }

    /// Holds what a take lends.
    pub(super) fn hold(&self, lent: Option<Lent>) {
        let [sources, targets] = &mut *self.lent();
        sources.extend(lent.into_iter().map(|Lent { sources: one, targets: other }| {
            targets.push(other);
            one
        }));
    }

    /// Moves what is held of the device side to `returned`: it may be written or freed.
    pub(super) fn let_go_of_sources(&self, returned: &mut Vec<Owners>) {
        returned.append(&mut self.lent()[0]);
    }

    /// Moves all that is held to `returned`: no copy of it is under way any more.
    pub(super) fn let_go(&self, returned: &mut Vec<Owners>) {
        self.lent().iter_mut().for_each(|owners| returned.append(owners));
    }

    /// Bytes that were taken.
    pub(super) fn nbytes(&self) -> u64 {
        self.nbytes.load(Ordering::Relaxed)
    }

    /// Checks that a step reads the gradient of `tensor` where it was taken to, and as what it was
    /// taken.
    ///
    /// # Errors
    /// [`Error::Value`] where it does not.
    pub(super) fn check_target(&self, tensor: usize, grad: View) -> Result<()> {
        match self.targets()[tensor] {
            Some(target) if target != grad => Err(Error::value(format!(
                "the gradient of tensor `{tensor}` was taken to `{:#x}` as `{}`, and its step \
                 reads `{:#x}` as `{}`, expected the same memory and dtype\n\
                 hint: discard what was taken for another step",
                target.address(),
                target.dtype(),
                grad.address(),
                grad.dtype()
            ))),
            _ => Ok(()),
        }
    }

    /// Where the gradient of `tensor` was taken to, where it was taken as a whole.
    pub(super) fn target(&self, tensor: usize) -> Option<View> {
        self.targets()[tensor]
    }

    /// Nothing more is taken: queues the event behind all of it, for which there is room.
    ///
    /// # Errors
    /// As [`Downloads::push`].
    pub(super) fn seal(&self, downloads: &Arc<Downloads>) -> Result<()> {
        self.sealed.store(self.record(downloads)?, Ordering::Release);
        Ok(())
    }

    /// Queues the event behind all that was taken so far, for which there is room; its ticket.
    ///
    /// # Errors
    /// As [`Downloads::push`].
    pub(super) fn record(&self, downloads: &Arc<Downloads>) -> Result<u64> {
        // SAFETY: it is no copy.
        unsafe { downloads.push([Download::Record(self.whole_event())]) }
    }

    /// The ticket of the event behind all of it.
    pub(super) fn sealed(&self) -> u64 {
        self.sealed.load(Ordering::Acquire)
    }

    /// Waits until the gradient of a segment has arrived.
    ///
    /// # Errors
    /// [`Error::Os`] where it never will.
    pub(super) fn wait(
        &self,
        segment: usize,
        downloads: &Downloads,
        device: &dyn Device,
    ) -> Result<()> {
        match self.tickets[segment].load(Ordering::Acquire) {
            0 => self.wait_for_all(downloads, device),
            ticket => {
                // Until then the event stands for an older copy.
                downloads.wait(ticket)?;
                device.wait(self.first_event + segment)
            }
        }
    }

    /// Waits until all of it has arrived.
    ///
    /// # Errors
    /// [`Error::Os`] where it never will.
    pub(super) fn wait_for_all(&self, downloads: &Downloads, device: &dyn Device) -> Result<()> {
        downloads.wait(self.sealed())?;
        device.wait(self.whole_event())
    }

    /// It is free: nothing was taken.
    pub(super) fn clear(&self) {
        self.forget_tickets();
        self.nbytes.store(0, Ordering::Relaxed);
    }

    fn forget_tickets(&self) {
        self.tickets.iter().for_each(|ticket| ticket.store(0, Ordering::Release));
        self.targets().fill(None);
    }

    fn add_nbytes(&self, nbytes: usize) {
        self.nbytes.fetch_add(nbytes as u64, Ordering::Relaxed);
    }

    fn targets(&self) -> MutexGuard<'_, Box<[Option<View>]>> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lent(&self) -> MutexGuard<'_, [Vec<Owners>; 2]> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
