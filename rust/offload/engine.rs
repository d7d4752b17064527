//! What callers have of an engine: they make it, hand over steps, and wait. How they hand over
//! gradients is `gradients.rs`.

use std::{iter, ops::Range, process, time::Duration};

use super::{
    checks::{check_kind, check_taken, check_targets},
    downloads::{Downloads, IN_FLIGHT},
    generation::Generation,
    gradients::Next,
    job::{Announced, Jobs, Kind, Timing, Update},
    owners::Owners,
    pending::Pending,
    ring::{Deferral, Ring},
    segment::Segments,
    selected::{OnDevice, Selected},
    selection::Selectable,
    step::Stepper,
    thread::start,
    uploads::Uploads,
};
use crate::{
    device::{Attached, CHECKSUM_SUMS, Device, Stream},
    error::{Error, Result},
    host::pool::Pool,
    simd::isa::Isa,
    sync::{Arc, Mutex, MutexGuard, PoisonError, thread::JoinHandle},
    tier::{Tier, ram::Ram},
};

/// Places of the queue of downloads beside those of the segments: for marks, and copies of parts.
const SPARE_PLACES: usize = 256;

/// What an engine is made for.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// Elements of each tensor, in forward order.
    pub numels: &'a [usize],
    /// How many generations of gradients there may be: 1, or 2 to take one while another is
    /// stepped.
    pub generations: usize,
    /// For steps that are deferred: then the engine has memory for gradients, and two generations.
    pub deferral: Option<Deferral<'a>>,
}

/// What the threads of an engine have in common.
pub(super) struct Shared {
    pub(super) device: Arc<dyn Device>,
    pub(super) pool: Pool,
    pub(super) isa: Isa,
    pub(super) segments: Segments,
    pub(super) tier: Arc<dyn Tier>,
    pub(super) downloads: Downloads,
    pub(super) generations: Box<[Generation]>,
    pub(super) uploads: Uploads,
    pub(super) ring: Option<Ring>,
    pub(super) selected: Option<Selected>,
    /// A job that steps has it until it is stepped.
    pending: Mutex<Pending>,
    pub(super) jobs: Jobs,
}

impl Shared {
    pub(super) fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads of an engine that have not ended.
#[derive(Default)]
struct Threads {
    /// Moves jobs on.
    coordinator: Option<JoinHandle<()>>,
    /// Hands over the downloads.
    issuer: Option<JoinHandle<()>>,
}

/// See the [module](super). Dropping it waits for the step that runs and for all copies
/// ([`Engine::end`]).
pub struct Engine {
    pub(super) shared: Arc<Shared>,
    next: Mutex<Next>,
    threads: Mutex<Threads>,
    /// Addresses of what is pinned.
    pinned: Mutex<Vec<usize>>,
    /// The process that has the threads.
    process: u32,
}

impl Engine {
    /// An engine whose weights are on `device` (see [`crate::device::open`]), and whose state is in
    /// the tensors themselves.
    ///
    /// # Errors
    /// As [`crate::device::open`] and [`Engine::on`].
    pub fn new(device: &str, shape: Shape<'_>, pool: Pool, isa: Isa) -> Result<Self> {
        let device = crate::device::open(device, Self::events(shape))?;
        Self::on(device, shape, Arc::new(Ram), pool, isa)
    }

    /// How many events the device of an engine has room for.
    #[must_use]
    pub fn events(shape: Shape<'_>) -> usize {
        let segments = Segments::new(shape.numels);
        let of_gradients = shape.generations * Generation::events(&segments) + IN_FLIGHT;
        of_gradients + Uploads::events(&segments) + Selected::EVENTS
    }

    /// As [`Engine::new`], on a device that is open, with room for [`Engine::events`], and with the
    /// state in `tier`.
    ///
    /// # Errors
    /// [`Error::Value`] for other than 1 or 2 generations, or a deferral that does not fit;
    /// [`Error::Os`] where a thread cannot be started.
    pub fn on(
        device: Arc<dyn Device>,
        shape: Shape<'_>,
        tier: Arc<dyn Tier>,
        pool: Pool,
        isa: Isa,
    ) -> Result<Self> {
        let least = if shape.deferral.is_some() { 2 } else { 1 };
        if !(least..=2).contains(&shape.generations) {
            return Err(Error::value(format!(
                "generations is `{}`, expected 1 or 2, and 2 for deferred steps",
                shape.generations
            )));
        }
        let segments = Segments::new(shape.numels);
        let ring = shape.deferral.map(|deferral| Ring::new(&segments, &deferral)).transpose()?;
        let mut events = 0;
        let mut next_events = |count| {
            let first = events;
            events += count;
            first
        };
        let generations: Box<[Generation]> = (0..shape.generations)
            .map(|_| Generation::new(&segments, next_events(Generation::events(&segments))))
            .collect();
        let first_of_uploads = next_events(Uploads::events(&segments));
        let first_of_downloads = next_events(IN_FLIGHT);
        let selection = shape.deferral.and_then(|deferral| deferral.selection);
        let selected = match (&ring, selection) {
            (Some(ring), Some(selection)) => {
                device.prepare_channels()?;
                let first = next_events(Selected::EVENTS);
                Some(Selected::new(&segments, &ring.groups, &selection, first)?)
            }
            _ => None,
        };
        let places = shape.generations * segments.count() + SPARE_PLACES;
        let shared = Arc::new(Shared {
            downloads: Downloads::new(Arc::clone(&device), first_of_downloads, places),
            generations,
            uploads: Uploads::new(Arc::clone(&device), &segments, first_of_uploads),
            device,
            pool,
            isa,
            tier,
            jobs: Jobs::new(segments.tensors()),
            pending: Mutex::new(Pending::new(&segments, ring.as_ref())),
            ring,
            selected,
            segments,
        });
        let (coordinated, issued) = (Arc::clone(&shared), Arc::clone(&shared));
        // Dropped, it ends the threads that have been started.
        let engine = Self {
            next: Mutex::new(Next::new(shape.generations, shape.numels.len())),
            shared,
            threads: Mutex::default(),
            pinned: Mutex::default(),
            process: process::id(),
        };
        let mut stepper = Stepper::new(Arc::clone(&coordinated));
        let coordinator = start("stepwell-offload", move || coordinated.jobs.run(&mut stepper))?;
        engine.running().coordinator = Some(coordinator);
        let issuer = start("stepwell-issuer", move || issued.downloads.hand_over())?;
        engine.running().issuer = Some(issuer);
        Ok(engine)
    }

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
            uploads.order_stream_after_all(stream)?;
            // SAFETY: the caller vouches for weights, gradients and the stream, which comes after
            // the landings of the job before.
            let stepped = unsafe { selected.step(&**device, segments, updates, work, stream) };
            stepped.inspect_err(|error| jobs.fail(error))?;
        }
        uploads.order_after(stream).inspect_err(|error| {
            if selected.is_some() {
                jobs.fail(error);
            }
        })?;
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
        Ok(())
    }

    /// Starts a step of all that deferred steps have left pending, and returns: all weights land,
    /// none predicted. Gradients that were taken since the last submit are not touched. Whether
    /// there was anything.
    ///
    /// # Errors
    /// [`Error::Value`] while a step is running; [`Error::Os`] where the device has failed.
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
        Ok(true)
    }

    /// The segments of which channels may be selected; none without a [`Selection`].
    ///
    /// [`Selection`]: super::Selection
    pub fn selectable(&self) -> impl Iterator<Item = Selectable> {
        self.shared.selected.iter().flat_map(Selected::selectable)
    }

    /// The group of segments whose turn comes with the next deferred step; 0 where none is. Waits
    /// for a step that runs.
    #[must_use]
    pub fn next_group(&self) -> usize {
        let groups = self.shared.ring.as_ref().map_or(1, |ring| ring.groups.count());
        self.shared.pending().turn() % groups
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

    /// Writes the checksums of memory of the device, of [`CHECKSUM_SUMS`] 64-bit sums each, one
    /// after the other to `sums`, in the order of `stream`; see [`Device::checksum`].
    ///
    /// # Safety
    /// As [`Device::checksum`] asks of each.
    ///
    /// # Errors
    /// [`Error::Value`] for memory that is not of whole words; [`Error::Os`] where the device
    /// cannot, or has no kernel for it.
    pub unsafe fn checksums(
        &self,
        sources: &[(u64, usize)],
        sums: u64,
        stream: Stream,
    ) -> Result<()> {
        self.check_process()?;
        let device = &*self.shared.device;
        let _attached = Attached::to(device)?;
        let words = size_of::<u64>();
        for (place, &(address, nbytes)) in sources.iter().enumerate() {
            if address % words as u64 != 0 || nbytes % words != 0 {
                return Err(Error::value(format!(
                    "a checksum of `{nbytes}` bytes at `{address:#x}`, expected whole words of 8"
                )));
            }
            let sums = sums + (place * CHECKSUM_SUMS * words) as u64;
            // SAFETY: passed on from the caller.
            unsafe { device.checksum(stream, address, nbytes / words, sums) }?;
        }
        Ok(())
    }

    /// Waits on this thread, no longer than `timeout`, until the uploads of these elements of a
    /// tensor are enqueued; then `stream` waits for them. Whether that was reached.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor or a range that the engine does not have; [`Error::Os`] where
    /// the step or the device has failed.
    pub fn wait(
        &self,
        index: usize,
        elements: &Range<usize>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<bool> {
        let Shared { device, segments, uploads, jobs, .. } = &*self.shared;
        segments.check_tensor(index)?;
        if elements.start > elements.end || elements.end > segments.numel(index) {
            return Err(Error::value(format!(
                "elements `{}..{}` of a tensor of {}, expected a range within it",
                elements.start,
                elements.end,
                segments.numel(index)
            )));
        }
        self.check_process()?;
        let holding = segments.holding(index, elements);
        if !jobs.wait_until(timeout, || uploads.are_enqueued(holding.clone()))? {
            return Ok(false);
        }
        let _attached = Attached::to(&**device)?;
        uploads.order_stream(stream, holding)?;
        Ok(true)
    }

    /// Waits on this thread, no longer than `timeout`, until the step is done on the host; then
    /// `stream` waits for all uploads. Whether that was reached.
    ///
    /// # Errors
    /// [`Error::Os`] where the step or the device has failed.
    pub fn finish(&self, stream: Stream, timeout: Duration) -> Result<bool> {
        let Shared { device, uploads, jobs, .. } = &*self.shared;
        self.check_process()?;
        if !jobs.wait_until_idle(timeout)? {
            return Ok(false);
        }
        let _attached = Attached::to(&**device)?;
        uploads.order_stream_after_all(stream)?;
        Ok(true)
    }

    /// Waits on this thread, no longer than `timeout` and the copies that are with the device take,
    /// until every copy that was taken or enqueued has ended. Whether that was reached. Not while a
    /// step runs.
    ///
    /// # Errors
    /// As [`Engine::finish`].
    pub fn drain(&self, timeout: Duration) -> Result<bool> {
        let Shared { device, downloads, generations, jobs, .. } = &*self.shared;
        self.check_process()?;
        // None of another thread's may come in between.
        let _next = self.next();
        jobs.check_idle()?;
        let _attached = Attached::to(&**device)?;
        let issued = downloads.wait_for_all(timeout);
        if matches!(issued, Ok(false)) {
            return Ok(false);
        }
        // Also where a later one has failed.
        device.drain()?;
        issued?;
        jobs.give_back(|returned| generations.iter().for_each(|one| one.let_go(returned)));
        jobs.wait_until_over(timeout)
    }

    /// What was lent and is not used any more: for the caller to drop. What it does not get to
    /// stays with the engine.
    #[must_use = "what is lent is dropped where this is consumed"]
    pub fn returned(&self) -> impl Iterator<Item = Owners> {
        // No look at the lock in a child: a thread that is not there may hold it. No lock is held
        // while one is dropped, which may call the engine.
        iter::from_fn(|| {
            (self.process == process::id()).then(|| self.shared.jobs.pop_returned()).flatten()
        })
    }

    /// Whether a step is running on the host; in a forked child, none is.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.process == process::id() && self.shared.jobs.is_busy()
    }

    /// What the last step took; in a forked child, nothing.
    #[must_use]
    pub fn timing(&self) -> Timing {
        if self.process == process::id() { self.shared.jobs.timing() } else { Timing::default() }
    }

    /// Workers that step.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.shared.pool.threads()
    }

    /// Pins host memory for the device, as long as the engine lives.
    ///
    /// # Safety
    /// The memory outlives the engine.
    ///
    /// # Errors
    /// [`Error::Os`] where the device refuses.
    pub unsafe fn pin(&self, address: usize, nbytes: usize) -> Result<()> {
        self.check_process()?;
        let _attached = Attached::to(&*self.shared.device)?;
        // SAFETY: passed on from the caller.
        unsafe { self.shared.device.pin(address, nbytes) }?;
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        Ok(())
    }

    /// Ends the engine: waits for the step that runs and for all copies, and unpins. What was lent
    /// is still held. No thread of the engine runs any more, so what is taken or submitted from now
    /// on is never done. Does nothing a second time, or in a forked child.
    pub fn end(&self) {
        if self.process != process::id() {
            return;
        }
        let Threads { coordinator, issuer } = std::mem::take(&mut *self.running());
        self.shared.jobs.quit();
        if let Some(coordinator) = coordinator {
            // Its body catches panics.
            let _ = coordinator.join();
        }
        // Not earlier: the step waits for what is issued.
        self.shared.downloads.quit();
        if let Some(issuer) = issuer {
            let _ = issuer.join();
        }
        let pinned =
            std::mem::take(&mut *self.pinned.lock().unwrap_or_else(PoisonError::into_inner));
        if let Ok(_attached) = Attached::to(&*self.shared.device) {
            // What was lent is dropped next. A failed device copies no more.
            let _ = self.shared.device.drain();
            for address in pinned {
                self.shared.device.unpin(address);
            }
        }
    }

    fn running(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn next(&self) -> MutexGuard<'_, Next> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn check_process(&self) -> Result<()> {
        if self.process == process::id() {
            return Ok(());
        }
        Err(Error::value(format!(
            "the offload engine belongs to process `{}`, this is `{}`\n\
             hint: make the optimizer after forking; for a child that reads weights, \
             synchronize() before forking",
            self.process,
            process::id()
        )))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.process == process::id() {
            self.end();
        } else {
            // A forked child has neither the threads nor the device.
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            let threads = std::mem::take(threads);
            std::mem::forget((threads.coordinator, threads.issuer, Arc::clone(&self.shared)));
        }
    }
}
