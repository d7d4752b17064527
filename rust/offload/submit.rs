//! Steps at the engine's door: what callers submit, and what they settle.

use std::time::Duration;

use super::{
    checks::{check_kind, check_taken, check_targets},
    engine::Engine,
    job::{Announced, Kind, Update},
    owners::Owners,
    pending::Pending,
    selected::{OnDevice, Selected},
    selection::Selectable,
    shared::Shared,
};
use crate::{
    device::{Attached, Behind, Stream},
    error::Result,
};

impl Engine {
    /// Starts a step of these tensors, in this order, and returns. Weights are uploaded after what
    /// `stream` holds now. Gradients on the device may be written after [`Engine::release`].
    ///
    /// `owners` keep alive what the updates name. They are taken where this returns no error, and
    /// come back ([`Engine::returned`]) when the step has ended, uploads and all.
    ///
    /// # Safety
    /// The memory of all views and weights is alive as long as the owners are. Nothing else uses it
    /// until the step is done; weights until they are waited for.
    ///
    /// # Errors
    /// [`Error::Value`], with nothing changed, for what [`crate::adam::batch::step`] refuses,
    /// tensors that the engine does not have or has twice in a call, gradients that are read
    /// elsewhere than they were taken to, or while a step is running; [`Error::Os`] where the
    /// device has failed.
    ///
    /// [`Error::Value`]: crate::error::Error::Value
    /// [`Error::Os`]: crate::error::Error::Os
    pub unsafe fn submit(
        &self,
        updates: &[Update],
        owners: &mut Option<Owners>,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: passed on from the caller.
        unsafe { self.submit_with(None, updates, OnDevice::default(), owners, stream) }
    }

    /// As [`Engine::submit`], of a step that is deferred. Its gradients wait for the turns of their
    /// segments. One group of segments has its turn: what is pending of it is stepped, and lands
    /// with the next job. Of every `interval` deferred steps in a row each group has one.
    ///
    /// The new weights run ahead by `predicted_updates` along the momentum: a forward reads a
    /// weight until `interval` more gradients have come. The state does not. 0: none is predicted.
    ///
    /// Owners stay until the last gradient of their step is applied and what it changed has landed:
    /// until the end of the job that is `2 * interval + 1` deferred ones later, or of one that
    /// steps all.
    ///
    /// # Safety
    /// As [`Engine::submit`].
    ///
    /// # Errors
    /// As [`Engine::submit`]; [`Error::Value`] also of an engine without memory for it, for a
    /// gradient that was not taken by [`Engine::take_deferred`], or for another state than the one
    /// that pending gradients are for.
    ///
    /// [`Error::Value`]: crate::error::Error::Value
    pub unsafe fn submit_deferred(
        &self,
        predicted_updates: f32,
        updates: &[Update],
        owners: &mut Option<Owners>,
        stream: Stream,
    ) -> Result<()> {
        let deferred = Some(predicted_updates);
        // SAFETY: passed on from the caller.
        unsafe { self.submit_with(deferred, updates, OnDevice::default(), owners, stream) }
    }

    /// As [`Engine::submit_deferred`], or, without `deferred`, as [`Engine::submit`]. Channels that
    /// are selected are stepped on the device, on `stream`; `work` has their gradients, and the
    /// selections that begin with this step.
    ///
    /// # Safety
    /// As [`Engine::submit`]. The gradients of `work` are alive until what `stream` holds is done,
    /// and those that write or free them come after that.
    ///
    /// # Errors
    /// As both; [`Error::Value`] also for a gradient that is missing, or a selection that does not
    /// fit ([`Engine::selectable`]).
    ///
    /// [`Error::Value`]: crate::error::Error::Value
    pub unsafe fn submit_with(
        &self,
        deferred: Option<f32>,
        updates: &[Update],
        work: OnDevice<'_>,
        owners: &mut Option<Owners>,
        stream: Stream,
    ) -> Result<()> {
        let kind =
            deferred.map_or(Kind::Whole, |predicted_updates| Kind::Deferred { predicted_updates });
        let Shared { device, segments, downloads, generations, uploads, jobs, ring, .. } =
            &*self.shared;
        let selected = self.shared.selected.as_ref();
        self.check_process()?;
        let mut next = self.next();
        next.checks.updates(updates, segments, ring.as_ref())?;
        check_kind(kind, ring.as_ref())?;
        let _attached = Attached::to(&**device)?;
        jobs.check_idle()?;
        downloads.check()?;
        let number = self.filled(&next)?;
        let generation = &generations[number];
        match ring {
            Some(ring) => check_taken(updates, segments, ring, generation, number)?,
            None => check_targets(updates, generation)?,
        }
        let pending = self.shared.pending();
        pending.check(segments, updates)?;
        let checks = &next.checks;
        if let Some(selected) = selected {
            selected.check(segments, updates, &work, |one| {
                let update = updates.iter().find(|update| update.index == one.tensor);
                let has_turn = |update: &Update| match (kind, ring) {
                    (Kind::Deferred { .. }, Some(ring)) => {
                        let is_next = one.group == pending.turn() % ring.groups.count();
                        is_next && !update.is_at_once
                    }
                    _ => true,
                };
                update.is_some_and(has_turn)
            })?;
        }
        generation.seal(downloads)?;
        if let Some(selected) = selected {
            if kind == Kind::Whole {
                selected.drop_all();
            }
            for update in updates.iter().filter(|update| update.is_at_once) {
                selected.drop_of(segments.of(update.index));
            }
            uploads.order_stream_after_all(stream).map_err(|error| jobs.fail(error))?;
            // SAFETY: the caller vouches for weights, gradients and the stream, which comes after
            // the landings of the job before.
            unsafe {
                selected.step(&**device, segments, updates, work, stream).and_then(|stepped| {
                    stepped.into_iter().try_for_each(|(segment, at)| {
                        let behind = Behind::Stream(stream);
                        uploads.take_checksum(segments, &updates[at], segment, behind)
                    })
                })
            }
            .map_err(|error| jobs.fail(error))?;
        }
        uploads
            .order_after(stream)
            .map_err(|error| if selected.is_some() { jobs.fail(error) } else { error })?;
        self.expect(kind, updates, &pending, |tensor| checks.is_named(tensor));
        drop(pending);
        let announced = next.announced.take().unwrap_or(Announced { generation: number });
        next.submitted = Some(number);
        next.reuse(number);
        let holds = match (kind, ring) {
            // The oldest gradient has its turn, its predicted weight lands, and, where no other
            // gradient comes, at the turn after that the weight itself.
            (Kind::Deferred { .. }, Some(ring)) => 2 * ring.groups.count() + 1,
            _ => 0,
        };
        jobs.submit(Some(announced), kind, updates, owners.take(), holds);
        self.movers.wake(&self.mover);
        Ok(())
    }

    /// Starts a step of all that deferred steps have left pending, and returns: all weights land,
    /// none predicted. Gradients that were taken since the last submit are not touched. Whether
    /// there was anything.
    ///
    /// # Errors
    /// [`Error::Value`] while a step is running; [`Error::Os`] where the device has failed.
    ///
    /// [`Error::Value`]: crate::error::Error::Value
    /// [`Error::Os`]: crate::error::Error::Os
    pub fn settle(&self, stream: Stream) -> Result<bool> {
        let Shared { device, uploads, jobs, .. } = &*self.shared;
        self.check_process()?;
        // No other job comes in between.
        let _next = self.next();
        jobs.check_idle()?;
        let pending = self.shared.pending();
        if !pending.is_any() {
            return Ok(false);
        }
        let _attached = Attached::to(&**device)?;
        uploads.order_after(stream)?;
        if let Some(selected) = &self.shared.selected {
            selected.drop_all();
        }
        self.expect(Kind::Whole, &[], &pending, |_| false);
        drop(pending);
        jobs.submit(None, Kind::Whole, &[], None, 0);
        self.movers.wake(&self.mover);
        Ok(true)
    }

    /// The segments of which channels may be selected; none without a [`Selection`].
    ///
    /// [`Selection`]: super::Selection
    pub fn selectable(&self) -> impl Iterator<Item = Selectable> {
        self.shared.selected.iter().flat_map(Selected::selectable)
    }

    /// The group of segments whose turn comes with the next deferred step; 0 where none is. Waits
    /// on this thread, no longer than `timeout`, until the step before is done on the host; None:
    /// that was not reached.
    ///
    /// # Errors
    /// [`Error::Os`] where the step or the device has failed.
    ///
    /// [`Error::Os`]: crate::error::Error::Os
    pub fn next_group(&self, timeout: Duration) -> Result<Option<usize>> {
        self.let_begin();
        // One that was submitted may not have begun, and so not have taken its turn.
        if !self.shared.jobs.wait_until_idle(timeout)? {
            return Ok(None);
        }
        let groups = self.shared.ring.as_ref().map_or(1, |ring| ring.groups.count());
        Ok(Some(self.shared.pending().turn() % groups))
    }

    /// Has what waits for weights wait for those that land with the job that comes next.
    fn expect(
        &self,
        kind: Kind,
        updates: &[Update],
        pending: &Pending,
        is_in_job: impl Fn(usize) -> bool,
    ) {
        let Shared { segments, uploads, .. } = &*self.shared;
        let is_deferred = matches!(kind, Kind::Deferred { .. });
        for update in updates.iter().filter(|update| !is_deferred || update.is_at_once) {
            uploads.expect(segments.of(update.index));
        }
        if is_deferred {
            for one in pending.landings() {
                uploads.expect(one.segment..one.segment + 1);
            }
            for tensor in (0..segments.tensors()).filter(|&tensor| !is_in_job(tensor)) {
                segments
                    .of(tensor)
                    .filter(|&segment| self.shared.is_left_ahead(pending, segment))
                    .for_each(|segment| uploads.expect(segment..segment + 1));
            }
        } else {
            (0..segments.count())
                .filter(|&segment| pending.is_pending(segment) || pending.is_behind(segment))
                .for_each(|segment| uploads.expect(segment..segment + 1));
        }
    }
}
