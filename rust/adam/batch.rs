//! Many parameters at once: validates, splits them into chunks, and runs the chunks on the pool.
//!
//! A chunk never crosses a parameter, so what it computes depends on nothing but its own elements and their index within
//! the parameter: the result is the same for every pool (S1). All checks come before the first write (S2).

use std::ops::Range;

use super::{
    Hyper, Step,
    kernel::update,
    tensor::{AdamTensor, MasterLayout, MomentsLayout},
};
use crate::{
    cursor::Cursor,
    element::{Bf16, Dtype, Element, F16},
    error::{Error, Result},
    isa::Isa,
    pool::Pool,
    state::{
        BLOCK, Master,
        chunk::Chunk,
        dither::Dither,
        master::{Plain, Shadowed, WithWeightOut},
        moments::{Nearest, Stochastic},
        q8::{Coded, GROUP, Q8},
        split::{Fingerprint, Split},
    },
    view::{View, check_disjoint},
};

/// Steps every tensor once, in place; `counts[i]` is the number of this update of tensor `i`, from 1.
///
/// # Safety
/// The memory of all views is alive, and nobody else uses it during the call.
///
/// # Errors
/// [`Error::Value`], before anything is changed, for hyper-parameters out of range, a tensor without gradient, a count of
/// 0, or memory that overlaps.
pub unsafe fn step(pool: &Pool, isa: Isa, tensors: &[AdamTensor], counts: &[u64], hyper: &Hyper) -> Result<()> {
    hyper.validate()?;
    let grads = grads_of(tensors, counts)?;
    check_disjoint(tensors.iter().flat_map(AdamTensor::written), grads.iter().map(|&grad| ("grad", grad)))?;
    let steps: Vec<Step> = counts.iter().map(|&count| Step::new(hyper, count)).collect();
    let chunks = Chunk::all(tensors.iter().map(|tensor| tensor.param.numel()));
    pool.run(chunks.len(), &|task| {
        let Chunk { tensor, .. } = chunks[task];
        // SAFETY: the caller vouches for the memory; views are disjoint, as checked, and so are the chunks of a tensor.
        unsafe { step_chunk(isa, &tensors[tensor], grads[tensor], &steps[tensor], chunks[task]) };
    });
    Ok(())
}

/// The gradients of a call's tensors, with the counts checked on the way.
pub(crate) fn grads_of(tensors: &[AdamTensor], counts: &[u64]) -> Result<Vec<View>> {
    if tensors.len() != counts.len() {
        return Err(Error::value(format!("steps has `{}` numbers, expected {}", counts.len(), tensors.len())));
    }
    if let Some(tensor) = counts.iter().position(|&count| count == 0) {
        return Err(Error::value(format!("steps[{tensor}] is `0`, expected the number of this update, from 1")));
    }
    let grad = |(index, tensor): (usize, &AdamTensor)| {
        tensor.grad.ok_or_else(|| Error::value(format!("tensor {index} has no grad, expected one to step with")))
    };
    tensors.iter().enumerate().map(grad).collect()
}

/// Steps one chunk of a tensor with the same chunk of its gradient.
///
/// # Safety
/// The memory of the tensor and the gradient is alive, and nobody else uses this chunk of it.
pub(crate) unsafe fn step_chunk(isa: Isa, tensor: &AdamTensor, grad: View, step: &Step, chunk: Chunk) {
    let range = chunk.range(tensor.param.numel());
    // SAFETY: passed on from the caller.
    unsafe {
        match grad.dtype() {
            Dtype::BFloat16 => step_master::<Bf16>(isa, tensor, grad, step, chunk, range),
            Dtype::Float16 => step_master::<F16>(isa, tensor, grad, step, chunk, range),
            _ => step_master::<f32>(isa, tensor, grad, step, chunk, range),
        }
    }
}

/// # Safety
/// As [`step_chunk`]; `G` is the gradient's dtype.
unsafe fn step_master<G: Element>(
    isa: Isa,
    tensor: &AdamTensor,
    grad: View,
    step: &Step,
    chunk: Chunk,
    range: Range<usize>,
) {
    // SAFETY: the caller vouches for the chunk's memory; each view is borrowed once.
    unsafe {
        let grad = grad.slice::<G>(range.clone());
        match tensor.master {
            MasterLayout::Float32 { weight_out: None } => {
                let master = Plain(Cursor::in_place(tensor.param.slice_mut::<f32>(range.clone())));
                step_moments(isa, tensor, grad, step, range, master);
            }
            MasterLayout::Float32 { weight_out: Some(weight) } => {
                let master = Cursor::in_place(tensor.param.slice_mut::<f32>(range.clone()));
                match weight.dtype() {
                    Dtype::Float16 => {
                        let weight = Cursor::in_place(weight.slice_mut::<F16>(range.clone()));
                        step_moments(isa, tensor, grad, step, range, WithWeightOut::new(master, weight));
                    }
                    _ => {
                        let weight = Cursor::in_place(weight.slice_mut::<Bf16>(range.clone()));
                        step_moments(isa, tensor, grad, step, range, WithWeightOut::new(master, weight));
                    }
                }
            }
            MasterLayout::Split { .. } => {
                with_split(isa, tensor, chunk, true, |master| step_moments(isa, tensor, grad, step, range, master));
            }
            MasterLayout::Shadowed { master } => {
                let master = Cursor::in_place(master.slice_mut::<f32>(range.clone()));
                let weight = Cursor::in_place(tensor.param.slice_mut::<F16>(range.clone()));
                step_moments(isa, tensor, grad, step, range, Shadowed::new(master, weight));
            }
            // The gradient has the parameter's dtype.
            MasterLayout::Plain16 => {
                let master = Plain(Cursor::in_place(tensor.param.slice_mut::<G>(range.clone())));
                let dither = Dither::new(tensor.key, step.count, range.start as u64);
                if tensor.moments == MomentsLayout::Float32 {
                    update(isa, step, grad, master, nearest::<f32>(tensor, range), dither);
                } else {
                    update(isa, step, grad, master, nearest::<G>(tensor, range), dither);
                }
            }
        }
    }
}

/// Lends a chunk of a split master, void where the parameter is not what the fingerprint was taken of. If the body
/// rewrites the chunk, the fingerprint is taken anew: only then do parameter and trailing bits belong together again. Without fingerprints they always do.
///
/// # Safety
/// As [`step_chunk`].
///
/// # Panics
/// If the master is not split.
pub(super) unsafe fn with_split(
    isa: Isa,
    tensor: &AdamTensor,
    chunk: Chunk,
    rewrites: bool,
    body: impl FnOnce(Split<'_>),
) {
    let MasterLayout::Split { trailing, fingerprints } = tensor.master else {
        unreachable!("only called for split masters")
    };
    let range = chunk.range(tensor.param.numel());
    // SAFETY: the caller vouches for the chunk's memory; `high` is reborrowed, never twice at once.
    unsafe {
        let high = tensor.param.slice_mut::<Bf16>(range.clone());
        let fingerprint =
            fingerprints.map(|fingerprints| &mut fingerprints.slice_mut::<i32>(chunk.index..chunk.index + 1)[0]);
        let void = fingerprint.as_ref().is_some_and(|known| isa.run(Fingerprint(high)).cast_signed() != **known);
        let low = trailing.slice_mut::<i16>(range);
        body(Split::new(Cursor::in_place(high), Cursor::in_place(low), void));
        if let Some(fingerprint) = fingerprint.filter(|_| rewrites) {
            *fingerprint = isa.run(Fingerprint(high)).cast_signed();
        }
    }
}

/// # Safety
/// As [`step_chunk`].
unsafe fn step_moments<G: Element, P: Master>(
    isa: Isa,
    tensor: &AdamTensor,
    grad: &[G],
    step: &Step,
    range: Range<usize>,
    master: P,
) {
    let dither = Dither::new(tensor.key, step.count, range.start as u64);
    // SAFETY: passed on from the caller.
    unsafe {
        match tensor.moments {
            MomentsLayout::Stochastic => update(isa, step, grad, master, stochastic(tensor, range), dither),
            MomentsLayout::Q8 { .. } => update(isa, step, grad, master, q8(tensor, range), dither),
            _ => update(isa, step, grad, master, nearest::<f32>(tensor, range), dither),
        }
    }
}

/// # Safety
/// As [`step_chunk`]; `T` is the moments' dtype.
pub(super) unsafe fn nearest<'a, T: Element>(tensor: &AdamTensor, range: Range<usize>) -> Nearest<'a, T> {
    // SAFETY: passed on from the caller.
    let (exp_avg, exp_avg_sq) =
        unsafe { (tensor.exp_avg.slice_mut(range.clone()), tensor.exp_avg_sq.slice_mut(range)) };
    Nearest::new(Cursor::in_place(exp_avg), Cursor::in_place(exp_avg_sq))
}

/// # Safety
/// As [`step_chunk`]; the moments are bf16.
pub(super) unsafe fn stochastic<'a>(tensor: &AdamTensor, range: Range<usize>) -> Stochastic<'a> {
    // SAFETY: passed on from the caller.
    let (exp_avg, exp_avg_sq) =
        unsafe { (tensor.exp_avg.slice_mut(range.clone()), tensor.exp_avg_sq.slice_mut(range)) };
    Stochastic::new(Cursor::in_place(exp_avg), Cursor::in_place(exp_avg_sq))
}

/// # Safety
/// As [`step_chunk`].
///
/// # Panics
/// If the moments are not q8.
pub(super) unsafe fn q8<'a>(tensor: &AdamTensor, range: Range<usize>) -> Q8<'a> {
    let MomentsLayout::Q8 { exp_avg_scales, exp_avg_sq_scales } = tensor.moments else {
        unreachable!("only called for q8 moments")
    };
    // Codes and scales are padded to whole blocks, and a chunk begins with one.
    let end = range.end.next_multiple_of(BLOCK);
    let (words, groups) = (range.start / 4..end / 4, range.start / GROUP..end / GROUP);
    // SAFETY: passed on from the caller.
    unsafe {
        let coded = |codes: View, scales: View| Coded {
            codes: Cursor::in_place(codes.words_mut(words.clone())),
            scales: Cursor::in_place(scales.slice_mut(groups.clone())),
        };
        Q8 { exp_avg: coded(tensor.exp_avg, exp_avg_scales), exp_avg_sq: coded(tensor.exp_avg_sq, exp_avg_sq_scales) }
    }
}
