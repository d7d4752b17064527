//! Many parameters at once: validates, splits them into chunks, and runs the chunks on the pool.
//!
//! A chunk never crosses a parameter, so what it computes depends on nothing but its own elements
//! and their index within the parameter: the result is the same for every pool. All checks
//! come before the first write. Where a chunk is read and where it is written is the [`Route`]
//! of each of its views: here the same, in `rust/tier/revocable.rs` two slots.
//!
//! Memory: a call has lists of its tensors, and of its chunks (16 B for each 64 Ki elements), until
//! it returns.

use std::marker::PhantomData;

use super::{Hyper, Step, kernel::update, tensor::AdamTensor};
use crate::{
    error::{Error, Result},
    host::pool::Pool,
    simd::isa::Isa,
    state::{
        Master, Moments,
        chunk::Chunk,
        codecs::{
            MasterVisitor, MomentsVisitor, visit_master, visit_moments, visit_plain16_moments,
        },
        dither::Dither,
        master::Plain,
    },
    stream::{
        cursor::publish,
        element::{Bf16, Dtype, Element, F16},
        view::{Route, View, check_disjoint},
    },
};

/// Steps every tensor once, in place; `counts[i]` is the number of this update of tensor `i`, from
/// 1.
///
/// # Safety
/// The memory of all views is alive, and nothing else uses it during the call.
///
/// # Errors
/// [`Error::Value`], before anything is changed, for hyper-parameters out of range, a tensor
/// without gradient, a count of 0, or memory that overlaps.
pub unsafe fn step(
    pool: &Pool,
    isa: Isa,
    tensors: &[AdamTensor],
    counts: &[u64],
    hyper: &Hyper,
) -> Result<()> {
    let grads = check(tensors, counts, hyper)?;
    let home = |chunk: Chunk| in_place(&tensors[chunk.tensor].chunk(chunk.index));
    // SAFETY: the caller vouches for the memory; views are disjoint, as checked.
    unsafe { step_all(pool, isa, &grads, counts, hyper, home) };
    Ok(())
}

/// Tensors that are stepped alike.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Each with a gradient.
    pub tensors: Vec<AdamTensor>,
    /// Of each the number of this update, from 1.
    pub counts: Vec<u64>,
    /// What to step them with.
    pub hyper: Hyper,
}

impl Batch {
    /// Of no tensor yet.
    #[must_use]
    pub fn new(hyper: Hyper) -> Self {
        Self { tensors: Vec::new(), counts: Vec::new(), hyper }
    }
}

/// As [`step`], of several batches: all are checked before any is stepped.
///
/// # Safety
/// As [`step`].
///
/// # Errors
/// As [`step`].
pub unsafe fn step_batches(pool: &Pool, isa: Isa, batches: &[Batch]) -> Result<()> {
    let mut grads = Vec::with_capacity(batches.len());
    for batch in batches {
        batch.hyper.validate()?;
        grads.push(grads_of(&batch.tensors, &batch.counts)?);
    }
    check_disjoint(
        batches.iter().flat_map(|batch| &batch.tensors).flat_map(AdamTensor::written),
        grads.iter().flatten().map(|&grad| ("grad", grad)),
    )?;
    for (batch, grads) in batches.iter().zip(&grads) {
        let home = |chunk: Chunk| in_place(&batch.tensors[chunk.tensor].chunk(chunk.index));
        // SAFETY: the caller vouches for the memory; views are disjoint, as checked.
        unsafe { step_all(pool, isa, grads, &batch.counts, &batch.hyper, home) };
    }
    Ok(())
}

/// All checks of a call. Returns the gradients.
pub(crate) fn check(tensors: &[AdamTensor], counts: &[u64], hyper: &Hyper) -> Result<Vec<View>> {
    hyper.validate()?;
    let grads = grads_of(tensors, counts)?;
    check_disjoint(
        tensors.iter().flat_map(AdamTensor::written),
        grads.iter().map(|&grad| ("grad", grad)),
    )?;
    Ok(grads)
}

/// Steps every chunk of the tensors that have these gradients, each by its `route`.
///
/// # Safety
/// As [`step_chunk`], for every chunk; what different chunks read and write is disjoint.
pub(crate) unsafe fn step_all(
    pool: &Pool,
    isa: Isa,
    grads: &[View],
    counts: &[u64],
    hyper: &Hyper,
    route: impl Fn(Chunk) -> AdamTensor<Route> + Sync,
) {
    // Most counts of a call are one: what follows from a count takes powers.
    let mut steps: Vec<Step> = Vec::with_capacity(counts.len());
    for &count in counts {
        let last = steps.last().filter(|step| step.count == count).copied();
        steps.push(last.unwrap_or_else(|| Step::new(hyper, count)));
    }
    let chunks = Chunk::all(grads.iter().map(View::numel));
    pool.run(chunks.len(), &|task| {
        let chunk = chunks[task];
        // SAFETY: passed on from the caller.
        unsafe { step_chunk(isa, &route(chunk), grads[chunk.tensor], &steps[chunk.tensor], chunk) };
    });
}

/// The route of a state that is written where it is read.
pub(crate) fn in_place(state: &AdamTensor) -> AdamTensor<Route> {
    state.map(|_, view| Route { from: view, to: view })
}

/// The gradients of a call's tensors, with tensors and counts checked on the way.
fn grads_of(tensors: &[AdamTensor], counts: &[u64]) -> Result<Vec<View>> {
    if tensors.len() != counts.len() {
        return Err(Error::value(format!(
            "steps has `{}` numbers, expected {}",
            counts.len(),
            tensors.len()
        )));
    }
    counts.iter().enumerate().try_for_each(|(index, &count)| check_count(index, count))?;
    tensors.iter().enumerate().map(|(index, tensor)| grad_of(index, tensor)).collect()
}

/// The gradient of the tensor at `index` in a call, with the tensor checked on the way.
pub(crate) fn grad_of(index: usize, tensor: &AdamTensor) -> Result<View> {
    tensor.check()?;
    tensor.grad.ok_or_else(|| {
        Error::value(format!("tensor {index} has no grad, expected one to step with"))
    })
}

/// Checks the number of the update of the tensor at `index` in a call.
pub(crate) fn check_count(index: usize, count: u64) -> Result<()> {
    if count > 0 {
        return Ok(());
    }
    Err(Error::value(format!("steps[{index}] is `0`, expected the number of this update, from 1")))
}

/// Steps one chunk of a tensor with the same chunk of its gradient. `state` is the chunk's
/// ([`AdamTensor::chunk`]): read in one slot, and written to the same or another. What is written
/// to another is published.
///
/// # Safety
/// The memory of the state and the gradient is alive, and nothing else uses this chunk of it.
pub(crate) unsafe fn step_chunk(
    isa: Isa,
    state: &AdamTensor<Route>,
    grad: View,
    step: &Step,
    chunk: Chunk,
) {
    let range = chunk.range(grad.numel());
    let dither = Dither::new(state.key, step.count, range.start as u64);
    let grad = grad.part(range);
    let chunk = ChunkStep { isa, step, state, grad, dither };
    // SAFETY: passed on from the caller.
    unsafe {
        match grad.dtype() {
            Dtype::BFloat16 => chunk.run::<Bf16>(),
            Dtype::Float16 => chunk.run::<F16>(),
            _ => chunk.run::<f32>(),
        }
    }
    if !state.param.is_in_place() {
        publish();
    }
}

/// Calls the visitor with the master of a chunk.
///
/// # Safety
/// The memory of the state, a chunk's, is alive, and nothing else uses it.
pub(super) unsafe fn with_master(isa: Isa, state: &AdamTensor<Route>, visitor: impl MasterVisitor) {
    let kind = state.layout().master;
    // SAFETY: passed on from the caller.
    unsafe { visit_master(isa, kind, state.param, state.master(), state.weight_out, visitor) };
}

/// A chunk that is to be stepped, and what with.
#[derive(Clone, Copy)]
struct ChunkStep<'a> {
    isa: Isa,
    step: &'a Step,
    state: &'a AdamTensor<Route>,
    grad: View,
    dither: Dither,
}

impl ChunkStep<'_> {
    /// # Safety
    /// As [`step_chunk`]; `G` is the gradient's dtype.
    unsafe fn run<G: Element>(self) {
        // SAFETY: passed on from the caller.
        unsafe {
            with_master(self.isa, self.state, WithMaster { chunk: self, grad: PhantomData::<G> });
        }
    }

    /// # Safety
    /// As [`step_chunk`]; `G` is the gradient's dtype.
    unsafe fn with_moments<'a, G: Element, P: Master>(self, master: P) -> WithMoments<'a, G, P> {
        // SAFETY: the caller vouches for the gradient's memory.
        let grad = unsafe { self.grad.slice::<G>(0..self.grad.numel()) };
        WithMoments { isa: self.isa, step: *self.step, grad, master, dither: self.dither }
    }
}

/// The step of a chunk, before its master is known.
struct WithMaster<'a, G> {
    chunk: ChunkStep<'a>,
    grad: PhantomData<G>,
}

impl<G: Element> MasterVisitor for WithMaster<'_, G> {
    const REWRITES: bool = true;

    fn visit<P: Master>(self, master: P) {
        let Self { chunk, .. } = self;
        let (kind, moments) = (chunk.state.layout().moments, chunk.state.moments());
        // SAFETY: [`ChunkStep::run`]'s caller vouches for the memory and the dtype.
        unsafe { visit_moments(kind, moments, chunk.with_moments::<G, P>(master)) };
    }

    fn visit_plain16<T: Element>(self, parameter: Plain<'_, T>) {
        let Self { chunk, .. } = self;
        let (kind, moments) = (chunk.state.layout().moments, chunk.state.moments());
        // SAFETY: as above; the gradient of such a parameter has its dtype.
        unsafe {
            let moments_visitor = chunk.with_moments::<T, _>(parameter);
            visit_plain16_moments::<T>(kind, moments, moments_visitor);
        };
    }
}

/// The step of a chunk, before its moments are known.
struct WithMoments<'a, G, P> {
    isa: Isa,
    step: Step,
    grad: &'a [G],
    master: P,
    dither: Dither,
}

impl<G: Element, P: Master> MomentsVisitor for WithMoments<'_, G, P> {
    fn visit<const Q: usize, M: Moments<Q>>(self, moments: M) {
        let Self { isa, step, grad, master, dither } = self;
        update(isa, &step, grad, master, moments, dither);
    }
}
