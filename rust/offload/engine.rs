//! What callers have of an engine: they hand over gradients and steps, and wait.

use std::{collections::HashSet, iter, ops::Range, process, time::Duration};

use super::{
    downloads::{Download, Downloads, IN_FLIGHT},
    generation::Generation,
    job::{self, Announced, Jobs, Timing, Update},
    landing::Landing,
    owners::{Lent, Owners},
    schedule::Forward,
    segment::Segments,
    step::Stepper,
    thread::start,
};
use crate::{
    device::{Attached, Device, Stream},
    error::{Error, Result},
    host::pool::Pool,
    simd::isa::Isa,
    stream::view::View,
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
    pub(super) landing: Landing,
    pub(super) jobs: Jobs,
}

/// What callers' threads share of the job that comes next: one of them at a time takes, submits or
/// discards.
#[derive(Default)]
struct Next {
    /// The job that gradients have been taken for.
    announced: Option<Announced>,
    /// The generation that was submitted last.
    submitted: Option<usize>,
    /// The last discard, while copies of it may be under way and its generation has not been used
    /// again.
    discarded: Option<Discarded>,
}

/// The threads of an engine that have not ended.
#[derive(Default)]
struct Threads {
    /// Moves jobs on.
    coordinator: Option<JoinHandle<()>>,
    /// Hands over the downloads.
    issuer: Option<JoinHandle<()>>,
}

/// A discard that is to be waited for: [`Engine::discard`] gives it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discarded {
    generation: usize,
    /// Of the event behind all of it.
    ticket: u64,
}

impl Next {
    /// A generation is filled or submitted. What was lent for a discard of it that nobody has
    /// waited for comes back with what is lent now.
    fn reuse(&mut self, generation: usize) {
        self.discarded = self.discarded.filter(|discarded| discarded.generation != generation);
    }
}

/// See the [module](super). Dropping it waits for the step that runs and for all copies
/// ([`Engine::end`]).
pub struct Engine {
    shared: Arc<Shared>,
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
        shape.generations * Generation::events(&segments) + Landing::events(&segments) + IN_FLIGHT
    }

    /// As [`Engine::new`], on a device that is open, with room for [`Engine::events`], and with the
    /// state in `tier`.
    ///
    /// # Errors
    /// [`Error::Value`] for other than 1 or 2 generations; [`Error::Os`] where a thread cannot be
    /// started.
    pub fn on(
        device: Arc<dyn Device>,
        shape: Shape<'_>,
        tier: Arc<dyn Tier>,
        pool: Pool,
        isa: Isa,
    ) -> Result<Self> {
        if !(1..=2).contains(&shape.generations) {
            return Err(Error::value(format!(
                "generations is `{}`, expected 1 or 2",
                shape.generations
            )));
        }
        let segments = Segments::new(shape.numels);
        let mut events = 0;
        let mut next_events = |count| {
            let first = events;
            events += count;
            first
        };
        let generations: Box<[Generation]> = (0..shape.generations)
            .map(|_| Generation::new(&segments, next_events(Generation::events(&segments))))
            .collect();
        let first_of_landing = next_events(Landing::events(&segments));
        let places = shape.generations * segments.count() + SPARE_PLACES;
        let shared = Arc::new(Shared {
            downloads: Downloads::new(Arc::clone(&device), next_events(IN_FLIGHT), places),
            generations,
            landing: Landing::new(Arc::clone(&device), &segments, first_of_landing),
            device,
            pool,
            isa,
            tier,
            jobs: Jobs::default(),
            segments,
        });
        let (coordinated, issued) = (Arc::clone(&shared), Arc::clone(&shared));
        // Dropped, it ends the threads that have been started.
        let engine = Self {
            shared,
            next: Mutex::default(),
            threads: Mutex::default(),
            pinned: Mutex::default(),
            process: process::id(),
        };
        let mut stepper = Stepper::new(Arc::clone(&coordinated), Box::new(Forward));
        let coordinator = start("stepwell-offload", move || coordinated.jobs.run(&mut stepper))?;
        engine.running().coordinator = Some(coordinator);
        let issuer = start("stepwell-issuer", move || issued.downloads.hand_over())?;
        engine.running().issuer = Some(issuer);
        Ok(engine)
    }

    /// Copies whole gradients to the host: `(tensor, device address, host memory)` each, in this
    /// order, after what `stream` holds now. Waits, no longer than `timeout`, for nothing but room
    /// in the queue of copies; whether all of them are queued. If not, none is.
    ///
    /// What is `lent` keeps both sides alive. It is taken where this returns true, and comes back
    /// ([`Engine::returned`]): the device side after [`Engine::release`], both after
    /// [`Engine::discard`], [`Engine::drain`] or the end of the step.
    ///
    /// # Safety
    /// Both sides are alive as long as their owners are; nobody writes the device side until it is
    /// released, discarded or drained, nor uses the host side until the step that takes it is
    /// submitted and done, or it is discarded.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor or a size that the engine does not have, a tensor twice, or
    /// while a step is running that reads the only generation; [`Error::Os`] where the device has
    /// failed, also in copies of calls before.
    pub unsafe fn take(
        &self,
        gradients: &[(usize, u64, View)],
        lent: &mut Option<Lent>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<bool> {
        let segments = &self.shared.segments;
        let mut seen = HashSet::with_capacity(gradients.len());
        for (index, _, host) in gradients {
            segments.check_tensor(*index)?;
            if !seen.insert(*index) {
                return Err(Error::value(format!(
                    "tensor `{index}` stands twice in a call, expected each once"
                )));
            }
            host.expect("the gradient's host memory", &[host.dtype()], segments.numel(*index))?;
        }
        let copies = gradients.iter().flat_map(|&(index, source, host)| {
            segments.of(index).map(move |segment| {
                let elements = segments.elements(index, segment);
                let size = host.dtype().size();
                (segment, source + (elements.start * size) as u64, elements, host)
            })
        });
        let count = copies.clone().count();
        // SAFETY: passed on from the caller; segments lie within both sides.
        unsafe {
            self.fill(
                count,
                |first_event| {
                    copies.map(move |(segment, source, elements, host)| Download::Copy {
                        source,
                        target: host.address() + elements.start * host.dtype().size(),
                        nbytes: elements.len() * host.dtype().size(),
                        event: Some(first_event + segment),
                    })
                },
                |generation, mut ticket| {
                    for &(index, _, host) in gradients {
                        generation.set_taken(segments, index, host, ticket);
                        ticket += segments.of(index).len() as u64;
                    }
                },
                lent,
                stream,
                timeout,
            )
        }
    }

    /// As [`Engine::take`] of any device memory: `(device address, host memory)` each. The step
    /// begins when all of its generation is there.
    ///
    /// # Safety
    /// As [`Engine::take`].
    ///
    /// # Errors
    /// As [`Engine::take`]; [`Error::Value`] also for more copies than the queue has places for.
    pub unsafe fn take_part(
        &self,
        parts: &[(u64, View)],
        lent: &mut Option<Lent>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<bool> {
        let copy = |&(source, host): &(u64, View)| Download::Copy {
            source,
            target: host.address(),
            nbytes: host.nbytes(),
            event: None,
        };
        let nbytes = parts.iter().map(|(_, host)| host.nbytes()).sum();
        // SAFETY: passed on from the caller.
        unsafe {
            self.fill(
                parts.len(),
                |_| parts.iter().map(copy),
                |generation, _| generation.set_taken_in_parts(nbytes),
                lent,
                stream,
                timeout,
            )
        }
    }

    /// Queues so many `copies`, which are told the first event of the generation that is being
    /// filled, after what `stream` holds now. Then `queued` is told the ticket of the first.
    ///
    /// # Safety
    /// As [`Engine::take`].
    unsafe fn fill<C: Iterator<Item = Download>>(
        &self,
        count: usize,
        copies: impl FnOnce(usize) -> C,
        queued: impl FnOnce(&Generation, u64),
        lent: &mut Option<Lent>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<bool> {
        let Shared { device, downloads, generations, .. } = &*self.shared;
        self.check_process()?;
        let _attached = Attached::to(&**device)?;
        let mut next = self.next();
        downloads.check()?;
        let number = self.filled(&next)?;
        // A mark, and later the events behind a generation that is discarded and one that is not.
        if !downloads.wait_for_room(count + 3, timeout)? {
            return Ok(false);
        }
        let generation = &generations[number];
        let mark = Download::After(device.mark(stream)?);
        // SAFETY: passed on from the caller.
        let ticket =
            unsafe { downloads.push(iter::once(mark).chain(copies(generation.first_event())))? };
        queued(generation, ticket + 1);
        generation.hold(lent.take());
        next.reuse(number);
        next.announced = Some(Announced { generation: number });
        Ok(true)
    }

    /// The generation that is being filled, or can be.
    fn filled(&self, next: &Next) -> Result<usize> {
        let busy = self.shared.jobs.busy()?;
        if let Some(Announced { generation }) = next.announced {
            return Ok(generation);
        }
        let free = (0..self.shared.generations.len()).find(|&number| Some(number) != busy);
        free.ok_or_else(|| {
            Error::value(
                "a step is still running and reads the gradients, of which the engine has one \
                 generation; expected it to be finished first\n\
                 hint: an engine with two generations",
            )
        })
    }

    /// Starts a step of these tensors, in this order, and returns. Weights are uploaded after what
    /// `stream` holds now. Gradients on the device may be written after [`Engine::release`].
    ///
    /// `owners` keep alive what the updates name. They are taken where this returns no error, and
    /// come back ([`Engine::returned`]) when the step has ended, uploads and all.
    ///
    /// # Safety
    /// The memory of all views and weights is alive as long as the owners are, and nobody else uses
    /// it until the step is done; weights until they are waited for.
    ///
    /// # Errors
    /// [`Error::Value`], with nothing changed, for what [`crate::adam::batch::step`] refuses,
    /// tensors that the engine does not have or has twice in a call, gradients that are read
    /// elsewhere than they were taken to, or while a step is running; [`Error::Os`] where the
    /// device has failed.
    pub unsafe fn submit(
        &self,
        updates: Vec<Update>,
        owners: &mut Option<Owners>,
        stream: Stream,
    ) -> Result<()> {
        let Shared { device, segments, downloads, generations, landing, jobs, .. } = &*self.shared;
        job::check(&updates, segments)?;
        self.check_process()?;
        let _attached = Attached::to(&**device)?;
        let mut next = self.next();
        jobs.check_idle()?;
        downloads.check()?;
        let number = self.filled(&next)?;
        let generation = &generations[number];
        job::check_targets(&updates, generation)?;
        landing.order_after(stream)?;
        generation.seal(downloads)?;
        for update in &updates {
            landing.expect(segments.of(update.index));
        }
        let announced = next.announced.take().unwrap_or(Announced { generation: number });
        next.submitted = Some(number);
        next.reuse(number);
        jobs.submit(announced.decide(updates, owners.take()));
        Ok(())
    }

    /// Forgets the gradients that were taken since the last submit: no step takes them. Their
    /// copies may still be under way: [`Engine::wait_discarded`] waits for those. None: nothing was
    /// taken since, and all that was discarded before has been waited for, or its generation is in
    /// use again.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed.
    pub fn discard(&self) -> Result<Option<Discarded>> {
        let Shared { downloads, generations, .. } = &*self.shared;
        self.check_process()?;
        let mut next = self.next();
        if let Some(&Announced { generation: number }) = next.announced.as_ref() {
            let generation = &generations[number];
            generation.seal(downloads)?;
            generation.clear();
            next.announced = None;
            next.discarded = Some(Discarded { generation: number, ticket: generation.sealed() });
        }
        Ok(next.discarded)
    }

    /// Waits on this thread, no longer than `timeout`, until the device has all copies of what was
    /// discarded, and for these: both sides are the caller's again. Whether that was reached.
    ///
    /// What is taken after the discard is not waited for and not touched. Where it went to the same
    /// generation, what was lent for the copies comes back with that.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed.
    pub fn wait_discarded(&self, discarded: Discarded, timeout: Duration) -> Result<bool> {
        let Shared { device, downloads, generations, jobs, .. } = &*self.shared;
        self.check_process()?;
        if !downloads.wait_timeout(discarded.ticket, timeout)? {
            return Ok(false);
        }
        let _attached = Attached::to(&**device)?;
        let generation = &generations[discarded.generation];
        // Where it is sealed anew the event is a later one, behind these copies as well. Not
        // beneath the lock of `next`.
        device.wait(generation.whole_event())?;
        let mut next = self.next();
        if next.discarded == Some(discarded) {
            next.discarded = None;
            jobs.give_back(generation.let_go());
        }
        Ok(true)
    }

    /// Waits on this thread, no longer than `timeout`, until the device has all copies of the
    /// gradients of the last submit; then `stream` waits for them: what is launched on it from now
    /// on may write them, and their memory may be freed to it. Whether that was reached.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed.
    pub fn release(&self, stream: Stream, timeout: Duration) -> Result<bool> {
        let Shared { device, downloads, generations, jobs, .. } = &*self.shared;
        self.check_process()?;
        let next = self.next();
        let Some(number) = next.submitted else { return Ok(true) };
        let generation = &generations[number];
        if !downloads.wait_timeout(generation.sealed(), timeout)? {
            return Ok(false);
        }
        let _attached = Attached::to(&**device)?;
        device.order_stream_after(stream, generation.whole_event())?;
        // Unless it is being filled anew.
        if next.announced.as_ref().is_none_or(|announced| announced.generation != number) {
            jobs.give_back(generation.let_go_of_sources());
        }
        Ok(true)
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
        let Shared { device, segments, landing, jobs, .. } = &*self.shared;
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
        if !jobs.wait_until(timeout, || landing.are_enqueued(holding.clone()))? {
            return Ok(false);
        }
        let _attached = Attached::to(&**device)?;
        landing.order_stream(stream, holding)?;
        Ok(true)
    }

    /// Waits on this thread, no longer than `timeout`, until the step is done on the host; then
    /// `stream` waits for all uploads. Whether that was reached.
    ///
    /// # Errors
    /// [`Error::Os`] where the step or the device has failed.
    pub fn finish(&self, stream: Stream, timeout: Duration) -> Result<bool> {
        let Shared { device, landing, jobs, .. } = &*self.shared;
        self.check_process()?;
        if !jobs.wait_until_idle(timeout)? {
            return Ok(false);
        }
        let _attached = Attached::to(&**device)?;
        landing.order_stream_after_all(stream)?;
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
        jobs.give_back(generations.iter().flat_map(Generation::let_go));
        jobs.wait_until_over(timeout)
    }

    /// What was lent and is not used any more: for the caller to drop.
    #[must_use]
    pub fn returned(&self) -> Vec<Owners> {
        // No look at the lock in a child: a thread that is not there may hold it.
        if self.process == process::id() { self.shared.jobs.returned() } else { Vec::new() }
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

    fn next(&self) -> MutexGuard<'_, Next> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_process(&self) -> Result<()> {
        if self.process == process::id() {
            return Ok(());
        }
        Err(Error::value(format!(
            "the offload engine belongs to process `{}`, this is `{}`\n\
             hint: make the optimizer after forking",
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
