//! Gradients at the engine's door: what callers' threads take, discard and release.
//!
//! The copies themselves are `downloads.rs`, what belongs to the gradients of one
//! step is `generation.rs`.

use std::{iter, ops::Range, time::Duration};

use super::{
    downloads::Download,
    engine::Engine,
    generation::Generation,
    job::Announced,
    next::{Copies, Discarded, Next},
    owners::Lent,
    shared::Shared,
};
use crate::{
    device::{Attached, Stream},
    error::{Error, Result},
    stream::view::View,
};

/// Entries of the queue beside the copies of a call: a mark, and later the events behind a
/// generation that is discarded and one that is not.
const SPARE_ENTRIES: usize = 3;

impl Engine {
    /// Copies whole gradients to the host: `(tensor, device address, host memory)` each, in this
    /// order, after what `stream` holds now. Waits, no longer than `timeout`, for nothing but room
    /// in the queue of copies; whether all of them are queued. If not, none is.
    ///
    /// What is `lent` keeps both sides alive. It is taken where this returns true, and comes back
    /// ([`Engine::returned`]): the device side after [`Engine::release`], both after
    /// [`Engine::discard`], [`Engine::drain`] or the end of the step.
    ///
    /// # Safety
    /// Both sides are alive as long as their owners are. Nothing writes the device side until it is
    /// released, discarded or drained. Nothing else uses the host side until the step that takes it
    /// is submitted and done, or it is discarded.
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
        self.check_process()?;
        let segments = &self.shared.segments;
        let mut next = self.next();
        next.checks.gradients(gradients, segments)?;
        let number = self.filled(&next)?;
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
                &mut next,
                number,
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

    /// As [`Engine::take`], to the engine's own memory for deferred gradients: `(tensor, device
    /// address)` each. What is lent keeps the device side alive.
    ///
    /// # Safety
    /// As [`Engine::take`], for the device side.
    ///
    /// # Errors
    /// As [`Engine::take`]; [`Error::Value`] also of an engine without such memory.
    pub unsafe fn take_deferred(
        &self,
        gradients: &[(usize, u64)],
        lent: &mut Option<Lent>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<bool> {
        self.check_process()?;
        let Shared { segments, ring, .. } = &*self.shared;
        let ring = ring.as_ref().ok_or_else(|| {
            Error::value("gradients are deferred, expected an engine with memory for them")
        })?;
        let mut next = self.next();
        next.checks.names(gradients.iter().map(|&(index, _)| index), segments)?;
        let number = self.filled(&next)?;
        let each = gradients
            .iter()
            .flat_map(|&(index, source)| segments.of(index).map(move |at| (index, source, at)));
        // Before shares are reserved: a call that finds no room leaves none behind.
        let room = each.clone().count() + SPARE_ENTRIES;
        if !self.shared.downloads.wait_for_room(room, timeout)? {
            return Ok(false);
        }
        ring.reserve(number, each.clone().map(|(_, _, segment)| segment))?;
        let copies = each.map(|(index, source, segment)| {
            let host = ring.gradient(number, segments, index, segment);
            let host = host.unwrap_or_else(|| unreachable!("its share is reserved"));
            let before = segments.elements(index, segment).start * host.dtype().size();
            (segment, source + before as u64, host)
        });
        let count = copies.clone().count();
        // SAFETY: passed on from the caller; the ring's memory outlives the engine, and the share
        // is this generation's.
        unsafe {
            self.fill(
                &mut next,
                number,
                count,
                |first_event| {
                    copies.clone().map(move |(segment, source, host)| Download::Copy {
                        source,
                        target: host.address(),
                        nbytes: host.nbytes(),
                        event: Some(first_event + segment),
                    })
                },
                |generation, mut ticket| {
                    for &(index, _) in gradients {
                        let of = segments.of(index);
                        let first = ring.whole_gradient(number, segments, index, of.start);
                        if let Some(first) = first.filter(|_| !of.is_empty()) {
                            generation.set_taken(segments, index, first, ticket);
                        }
                        ticket += of.len() as u64;
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
        self.check_process()?;
        let mut next = self.next();
        let number = self.filled(&next)?;
        // SAFETY: passed on from the caller.
        unsafe {
            self.fill(
                &mut next,
                number,
                parts.len(),
                |_| parts.iter().map(copy),
                |generation, _| generation.set_taken_in_parts(nbytes),
                lent,
                stream,
                timeout,
            )
        }
    }

    /// Parts of gradients come to host memory by copies of the caller's, which `stream` holds all
    /// now: `(tensor, elements)` each. A segment is stepped when its parts are there, if it has
    /// any. Waits, no longer than `timeout`, for nothing but room in the queue of copies; whether
    /// all is queued. If not, nothing is.
    ///
    /// # Safety
    /// Nothing else uses the parts' host side until the step that takes them is submitted and done,
    /// or they are discarded and `stream` has copied them.
    ///
    /// # Errors
    /// [`Error::Value`] for elements that the engine does not have, or while a step is running that
    /// reads the only generation; [`Error::Os`] where the device has failed.
    pub unsafe fn expect_parts(
        &self,
        parts: &[(usize, Range<usize>)],
        stream: Stream,
        timeout: Duration,
    ) -> Result<bool> {
        self.check_process()?;
        let segments = &self.shared.segments;
        for (tensor, elements) in parts {
            segments.check_elements(*tensor, elements)?;
        }
        let holding =
            |(tensor, elements): &(usize, Range<usize>)| segments.holding(*tensor, elements);
        let mut touched: Vec<_> = parts.iter().flat_map(holding).collect();
        touched.sort_unstable();
        touched.dedup();
        let mut next = self.next();
        let number = self.filled(&next)?;
        // SAFETY: nothing is copied.
        unsafe {
            self.fill(
                &mut next,
                number,
                touched.len(),
                |first_event| {
                    touched.iter().map(move |segment| Download::Record(first_event + segment))
                },
                |generation, first| {
                    for (&segment, ticket) in touched.iter().zip(first..) {
                        generation.set_expected(segment, ticket);
                    }
                },
                &mut None,
                stream,
                timeout,
            )
        }
    }

    /// Queues so many `copies`, which are told the first event of generation `number`, which
    /// [`Engine::filled`] chose for this call, after what `stream` holds now. Then `queued` is told
    /// the ticket of the first.
    ///
    /// # Safety
    /// As [`Engine::take`].
    #[expect(clippy::too_many_arguments, reason = "what four calls have in common")]
    unsafe fn fill<C: Iterator<Item = Download>>(
        &self,
        next: &mut Next,
        number: usize,
        count: usize,
        copies: impl FnOnce(usize) -> C,
        queued: impl FnOnce(&Generation, u64),
        lent: &mut Option<Lent>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<bool> {
        let Shared { device, downloads, generations, .. } = &*self.shared;
        let _attached = Attached::to(&**device)?;
        downloads.check()?;
        if !downloads.wait_for_room(count + SPARE_ENTRIES, timeout)? {
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
    pub(super) fn filled(&self, next: &Next) -> Result<usize> {
        let busy = self.shared.jobs.busy()?;
        if let Some(Announced { generation }) = next.announced {
            return Ok(generation);
        }
        let busy = busy.and_then(|busy| busy.generation);
        let free = (0..self.shared.generations.len()).find(|&number| Some(number) != busy);
        free.ok_or_else(|| {
            Error::value(
                "a step is still running and reads the gradients, of which the engine has one \
                 generation; expected it to be finished first\n\
                 hint: an engine with two generations",
            )
        })
    }

    /// Orders `stream` after the copies of all gradients that were taken since the last submit:
    /// what is launched on it from now on may write them. Waits, no longer than `timeout`, until
    /// the device has these copies; whether that was reached. If not, `queued` says how far it is,
    /// for another call.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed.
    pub fn order_after_copies(
        &self,
        queued: &mut Option<Copies>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<bool> {
        let Shared { device, downloads, generations, .. } = &*self.shared;
        self.check_process()?;
        let Copies { generation, ticket } = match *queued {
            Some(copies) => copies,
            None => {
                let next = self.next();
                let Some(&Announced { generation }) = next.announced.as_ref() else {
                    return Ok(true);
                };
                // Beside the room of two events that are queued without a wait.
                if !downloads.wait_for_room(SPARE_ENTRIES, timeout)? {
                    return Ok(false);
                }
                let ticket = generations[generation].record(downloads)?;
                *queued.insert(Copies { generation, ticket })
            }
        };
        if !downloads.wait_timeout(ticket, timeout)? {
            return Ok(false);
        }
        let _attached = Attached::to(&**device)?;
        // Where it was recorded anew meanwhile it is a later one, behind these copies as well.
        device.order_stream_after(stream, generations[generation].whole_event())?;
        Ok(true)
    }

    /// Forgets the gradients that were taken since the last submit: no step takes them. Their
    /// copies may still be under way: [`Engine::wait_discarded`] waits for those. None: nothing was
    /// taken since, and all that was discarded before has been waited for, or its generation is in
    /// use again.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed.
    pub fn discard(&self) -> Result<Option<Discarded>> {
        let Shared { downloads, generations, ring, .. } = &*self.shared;
        self.check_process()?;
        let mut next = self.next();
        if let Some(&Announced { generation: number }) = next.announced.as_ref() {
            let generation = &generations[number];
            generation.seal(downloads)?;
            generation.clear();
            if let Some(ring) = ring {
                ring.discard(number);
            }
            next.announced = None;
            next.discarded[number] = Some(generation.sealed());
        }
        Ok(next.last_discarded())
    }

    /// Waits on this thread, no longer than `timeout`, until the device has all copies of what was
    /// discarded, then and before, and for these: both sides are the caller's again. Whether that
    /// was reached.
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
        // Where it is sealed anew the event is a later one, behind these copies as well. Not
        // beneath the lock of `next`.
        device.wait(generations[discarded.generation].whole_event())?;
        let mut next = self.next();
        for (generation, last) in generations.iter().zip(&mut next.discarded) {
            // The download lane keeps its order, so what was discarded before has ended as well.
            if last.take_if(|ticket| *ticket <= discarded.ticket).is_some() {
                jobs.give_back(|returned| generation.let_go(returned));
            }
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
            jobs.give_back(|returned| generation.let_go_of_sources(returned));
        }
        Ok(true)
    }
}
