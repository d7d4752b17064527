//! An engine from its start to its end, and what callers wait for. How they hand over gradients is
//! `gradients.rs`, and steps `submit.rs`.

use std::{iter, ops::Range, process, time::Duration};

use super::{
    downloads::{Downloads, IN_FLIGHT},
    generation::Generation,
    job::{Jobs, Timing},
    next::Next,
    owners::Owners,
    pending::Pending,
    ring::{Deferral, Ring},
    segment::Segments,
    selected::Selected,
    shared::Shared,
    step::Stepper,
    uploads::Uploads,
};
use crate::{
    device::{Attached, Device, Stream},
    error::{Error, Result},
    host::{
        executor::{Executor, Role, Task},
        pool::Pool,
    },
    simd::isa::Isa,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
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

/// See the [module](super). Dropping it waits for the step that runs and for all copies
/// ([`Engine::end`]).
pub struct Engine {
    pub(super) shared: Arc<Shared>,
    next: Mutex<Next>,
    /// Its threads move jobs on.
    pub(super) movers: &'static Executor,
    /// Moves this engine's on.
    pub(super) mover: Arc<dyn Task>,
    /// Addresses and bytes of what is pinned.
    pinned: Mutex<Vec<(usize, usize)>>,
    /// The process whose threads work for it.
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
        let movers = Executor::of_process(Role::Jobs)?;
        let issuers = Executor::of_process(Role::Copies)?;
        let places = shape.generations * segments.count() + SPARE_PLACES;
        let shared = Arc::new(Shared {
            downloads: Arc::new(Downloads::new(
                Arc::clone(&device),
                first_of_downloads,
                places,
                issuers,
            )),
            generations,
            uploads: Uploads::new(Arc::clone(&device), &segments, first_of_uploads),
            device,
            pool,
            isa,
            tier,
            jobs: Jobs::new(segments.tensors(), movers),
            pending: Mutex::new(Pending::new(&segments, ring.as_ref())),
            ring,
            selected,
            segments,
        });
        Ok(Self {
            next: Mutex::new(Next::new(shape.generations, shape.numels.len())),
            mover: Arc::new(Mutex::new(Stepper::new(Arc::clone(&shared)))),
            movers,
            shared,
            pinned: Mutex::default(),
            process: process::id(),
        })
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
        segments.check_elements(index, elements)?;
        self.check_process()?;
        self.let_begin();
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
        self.let_begin();
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
        self.let_begin();
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

    /// What belongs to a step that was submitted has failed: every call fails from now on, with
    /// the error that this returns.
    #[must_use = "it is the caller's to raise"]
    pub fn fail(&self, error: Error) -> Error {
        self.shared.jobs.fail(error)
    }

    /// Steps that are submitted from now on begin when something waits for them, or with
    /// [`Engine::let_begin`]: what does not wait then finds the old weights, every time. For tests.
    pub fn hold(&self) {
        self.shared.jobs.hold();
    }

    /// Has the step that was submitted begin.
    pub fn let_begin(&self) {
        if self.shared.jobs.is_held() {
            self.shared.jobs.let_begin();
            self.movers.wake(&self.mover);
        }
    }

    /// Whether a step that was submitted waits for [`Engine::let_begin`].
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.shared.jobs.is_held()
    }

    /// Whether a step is running on the host, or has failed there; in a forked child, none is.
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
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).push((address, nbytes));
        Ok(())
    }

    /// Bytes of what is pinned.
    #[must_use]
    pub fn pinned_nbytes(&self) -> usize {
        let pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.iter().map(|(_, nbytes)| nbytes).sum()
    }

    /// Ends the engine: waits for the step that runs and for all copies, and unpins. What was lent
    /// is still held. No thread works for the engine any more, and nothing is taken or submitted
    /// from now on. Nothing is left to do a second time, or in a forked child.
    pub fn end(&self) {
        if self.process != process::id() {
            return;
        }
        self.let_begin();
        self.movers.join(&self.mover);
        // Not earlier: the step waits for what is issued.
        self.shared.downloads.join();
        let pinned =
            std::mem::take(&mut *self.pinned.lock().unwrap_or_else(PoisonError::into_inner));
        if let Ok(_attached) = Attached::to(&*self.shared.device) {
            // What was lent is dropped next. A failed device copies no more.
            let _ = self.shared.device.drain();
            for (address, _) in pinned {
                self.shared.device.unpin(address);
            }
        }
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
            std::mem::forget(Arc::clone(&self.mover));
        }
    }
}
