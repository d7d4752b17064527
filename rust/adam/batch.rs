//! Many parameters at once: validates, splits them into chunks, and runs the chunks on the pool.
//!
//! A chunk never crosses a parameter, so what it computes depends on nothing but its own elements
//! and their index within the parameter: the result is the same for every pool (S1). All checks
//! come before the first write (S2). Where a chunk is read and where it is written is the [`Route`]
//! of each of its views: here the same, in [`super::revocable`] two slots.

use super::{
    Hyper, Step,
    kernel::update,
    tensor::{AdamTensor, MasterLayout, MomentsLayout},
};
use crate::{
    error::{Error, Result},
    host::pool::Pool,
    simd::isa::Isa,
    state::{
        Master,
        chunk::{CHUNK_LEN, Chunk},
        dither::Dither,
        master::{Plain, Shadowed, WithWeightOut},
        moments::{Nearest, Stochastic},
        q8::{Coded, Q8},
        split::{Fingerprint, Split},
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
/// The memory of all views is alive, and nobody else uses it during the call.
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
    let steps: Vec<Step> = counts.iter().map(|&count| Step::new(hyper, count)).collect();
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

/// The gradients of a call's tensors, with the counts checked on the way.
pub(crate) fn grads_of(tensors: &[AdamTensor], counts: &[u64]) -> Result<Vec<View>> {
    if tensors.len() != counts.len() {
        return Err(Error::value(format!(
            "steps has `{}` numbers, expected {}",
            counts.len(),
            tensors.len()
        )));
    }
    if let Some(tensor) = counts.iter().position(|&count| count == 0) {
        return Err(Error::value(format!(
            "steps[{tensor}] is `0`, expected the number of this update, from 1"
        )));
    }
    let grad = |(index, tensor): (usize, &AdamTensor)| {
        tensor.grad.ok_or_else(|| {
            Error::value(format!("tensor {index} has no grad, expected one to step with"))
        })
    };
    tensors.iter().enumerate().map(grad).collect()
}

/// Steps one chunk of a tensor with the same chunk of its gradient. `state` is the chunk's
/// ([`AdamTensor::chunk`]): read in one slot, and written to the same or another. What is written
/// to another is published.
///
/// # Safety
/// The memory of the state and the gradient is alive, and nobody else uses this chunk of it.
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
    // SAFETY: passed on from the caller.
    unsafe {
        match grad.dtype() {
            Dtype::BFloat16 => step_master::<Bf16>(isa, state, grad, step, dither),
            Dtype::Float16 => step_master::<F16>(isa, state, grad, step, dither),
            _ => step_master::<f32>(isa, state, grad, step, dither),
        }
    }
    if !state.param.is_in_place() {
        publish();
    }
}

/// # Safety
/// As [`step_chunk`]; `grad` is the chunk's, and `G` its dtype.
unsafe fn step_master<G: Element>(
    isa: Isa,
    state: &AdamTensor<Route>,
    grad: View,
    step: &Step,
    dither: Dither,
) {
    // SAFETY: the caller vouches for the chunk's memory; each route is borrowed once.
    unsafe {
        let grad = grad.slice::<G>(0..grad.numel());
        match state.master {
            MasterLayout::Float32 { weight_out: None } => {
                step_moments(isa, state, grad, step, Plain(state.param.cursor::<f32>()), dither);
            }
            MasterLayout::Float32 { weight_out: Some(weight) } => match weight.to.dtype() {
                Dtype::Float16 => {
                    let master = WithWeightOut::new(state.param.cursor(), weight.cursor::<F16>());
                    step_moments(isa, state, grad, step, master, dither);
                }
                _ => {
                    let master = WithWeightOut::new(state.param.cursor(), weight.cursor::<Bf16>());
                    step_moments(isa, state, grad, step, master, dither);
                }
            },
            MasterLayout::Split { .. } => {
                with_split(isa, state, true, |master| {
                    step_moments(isa, state, grad, step, master, dither)
                });
            }
            MasterLayout::Shadowed { master } => {
                let master = Shadowed::new(master.cursor(), state.param.cursor::<F16>());
                step_moments(isa, state, grad, step, master, dither);
            }
            // The gradient has the parameter's dtype.
            MasterLayout::Plain16 => {
                let master = Plain(state.param.cursor::<G>());
                if state.moments == MomentsLayout::Float32 {
                    update(isa, step, grad, master, nearest::<f32>(state), dither);
                } else {
                    update(isa, step, grad, master, nearest::<G>(state), dither);
                }
            }
        }
    }
}

/// Lends a chunk of a split master, void where the parameter is not what the fingerprint was taken
/// of. If the body rewrites the chunk, the fingerprint is taken anew: only then do parameter and
/// trailing bits belong together again. Without fingerprints they always do.
///
/// # Safety
/// As [`step_chunk`].
///
/// # Panics
/// If the master is not split.
pub(super) unsafe fn with_split(
    isa: Isa,
    state: &AdamTensor<Route>,
    rewrites: bool,
    body: impl FnOnce(Split<'_>),
) {
    let MasterLayout::Split { trailing, fingerprints } = state.master else {
        unreachable!("only called for split masters")
    };
    // SAFETY: the caller vouches for the chunk's memory; every borrow of it ends before the next
    // begins.
    unsafe {
        let fingerprint_of =
            |high: View| isa.run(Fingerprint(high.slice(0..high.numel()))).cast_signed();
        let is_void =
            |known: Route| fingerprint_of(state.param.from) != known.from.slice::<i32>(0..1)[0];
        let void = fingerprints.is_some_and(is_void);
        let mut high = state.param.cursor();
        if fingerprints.is_some() {
            // These are in the cache now. Those of the next chunk, which are read as fast as they
            // come before its arithmetic begins, had better be.
            high = high.fetched(CHUNK_LEN);
        }
        body(Split::new(high, trailing.cursor(), void));
        if let Some(fingerprint) = fingerprints.filter(|_| rewrites) {
            fingerprint.to.slice_mut::<i32>(0..1)[0] = fingerprint_of(state.param.to);
        }
    }
}

/// # Safety
/// As [`step_chunk`].
unsafe fn step_moments<G: Element, P: Master>(
    isa: Isa,
    state: &AdamTensor<Route>,
    grad: &[G],
    step: &Step,
    master: P,
    dither: Dither,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        match state.moments {
            MomentsLayout::Stochastic => update(isa, step, grad, master, stochastic(state), dither),
            MomentsLayout::Q8 { .. } => update(isa, step, grad, master, q8(state), dither),
            _ => update(isa, step, grad, master, nearest::<f32>(state), dither),
        }
    }
}

/// # Safety
/// As [`step_chunk`]; `T` is the moments' dtype.
pub(super) unsafe fn nearest<'a, T: Element>(state: &AdamTensor<Route>) -> Nearest<'a, T> {
    // SAFETY: passed on from the caller.
    unsafe { Nearest::new(state.exp_avg.cursor(), state.exp_avg_sq.cursor()) }
}

/// # Safety
/// As [`step_chunk`]; the moments are bf16.
pub(super) unsafe fn stochastic<'a>(state: &AdamTensor<Route>) -> Stochastic<'a> {
    // SAFETY: passed on from the caller.
    unsafe { Stochastic::new(state.exp_avg.cursor(), state.exp_avg_sq.cursor()) }
}

/// # Safety
/// As [`step_chunk`].
///
/// # Panics
/// If the moments are not q8.
pub(super) unsafe fn q8<'a>(state: &AdamTensor<Route>) -> Q8<'a> {
    let MomentsLayout::Q8 { exp_avg_scales, exp_avg_sq_scales } = state.moments else {
        unreachable!("only called for q8 moments")
    };
    // SAFETY: passed on from the caller.
    unsafe {
        Q8 {
            exp_avg: Coded { codes: state.exp_avg.words(), scales: exp_avg_scales.cursor() },
            exp_avg_sq: Coded {
                codes: state.exp_avg_sq.words(),
                scales: exp_avg_sq_scales.cursor(),
            },
        }
    }
}
