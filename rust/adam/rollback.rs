//! Undoing a step of plain fp32 parameters with fp32 moments, by inverse arithmetic, where that is
//! possible.
//!
//! The inverse is computed in double precision and rounded, then stepped forward again with the
//! kernel itself: if what comes out is not what stands there, to within [`ROLLBACK_ULPS_MAX`]
//! roundings of what was added up, the step cannot be undone (a gradient that is not finite,
//! another gradient or count than that of the step, moments that underflowed), and nothing is
//! changed. What is restored is the state before the step but for its rounding: about a unit in the
//! last place of the larger of a moment before and after. For undoing to the bit, step out of place
//! and keep the old slot.

use std::{
    hint::black_box,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::{Hyper, Step, batch::grads_of, kernel::update, tensor::AdamTensor};
use crate::{
    error::{Error, Result},
    host::pool::Pool,
    simd::{fp_env::StandardFpEnv, isa::Isa},
    state::{
        chunk::Chunk,
        codecs::{MasterKind, MomentsKind},
        dither::Dither,
        master::Plain,
        moments::Nearest,
    },
    stream::{cursor::Cursor, element::Dtype, view::check_disjoint},
};

/// How far the undone and repeated step may lie from what stands there: the roundings of one
/// forward and one inverse step.
pub const ROLLBACK_ULPS_MAX: f64 = 4.0;

/// The coefficients of a step in double precision.
#[derive(Clone, Copy)]
struct Inverse {
    step: Step,
    grad_scale: f64,
    weight_keep: f64,
    l2: f64,
    beta1: f64,
    beta2: f64,
    step_size: f64,
    denom_scale: f64,
    eps: f64,
}

impl Inverse {
    fn new(hyper: &Hyper, count: u64) -> Self {
        let _standard = StandardFpEnv::enter();
        let step = black_box(Step::new(hyper, count));
        // The coefficients that the step was taken with are the rounded ones.
        Self {
            step,
            grad_scale: f64::from(step.grad_scale),
            weight_keep: f64::from(step.weight_keep),
            l2: f64::from(step.l2),
            beta1: f64::from(step.beta1),
            beta2: f64::from(step.beta2),
            step_size: f64::from(step.step_size),
            denom_scale: f64::from(step.denom_scale),
            eps: f64::from(step.eps),
        }
    }

    /// `(param, exp_avg, exp_avg_sq)` before the step.
    fn element(&self, p: f32, grad: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let (p, m, v) = (f64::from(p), f64::from(m), f64::from(v));
        let denom = v.sqrt() * self.denom_scale + self.eps;
        let before = (p + self.step_size * m / denom) / self.weight_keep;
        let grad = f64::from(grad) * self.grad_scale + self.l2 * before;
        let exp_avg = (m - f64::from(self.step.one_minus_beta1) * grad) / self.beta1;
        let exp_avg_sq = (v - f64::from(self.step.one_minus_beta2) * grad * grad) / self.beta2;
        // The rounding of the step may leave a little less than nothing; much less does not step
        // forward to v again.
        (before as f32, exp_avg as f32, exp_avg_sq.max(0.0) as f32)
    }
}

/// Whether `again`, the undone and repeated step, is what stands there: to within the rounding of
/// the largest magnitude that was added up on the way.
fn is_repeated(again: f32, stands: f32, before: f32, added: f32) -> bool {
    let largest = f64::from(stands.abs().max(before.abs()).max(added.abs()));
    let unit = (largest * f64::from(f32::EPSILON)).max(f64::from(f32::from_bits(1)));
    // False for a NaN, and for an infinity beside anything.
    (f64::from(again) - f64::from(stands)).abs() <= ROLLBACK_ULPS_MAX * unit
}

/// Undoes the step `counts[i]` of every tensor, if all of them can be undone.
///
/// # Safety
/// The memory of all views is alive, and nothing else uses it during the call.
///
/// # Errors
/// [`Error::Value`], with nothing changed: as [`super::batch::step`], for other layouts than plain
/// fp32, and where a step cannot be undone.
pub unsafe fn rollback(
    pool: &Pool,
    isa: Isa,
    tensors: &[AdamTensor],
    counts: &[u64],
    hyper: &Hyper,
) -> Result<()> {
    hyper.validate()?;
    let grads = grads_of(tensors, counts)?;
    check_disjoint(
        tensors.iter().flat_map(AdamTensor::written),
        grads.iter().map(|&grad| ("grad", grad)),
    )?;
    for (index, (tensor, grad)) in tensors.iter().zip(&grads).enumerate() {
        let layout = tensor.layout();
        let is_plain = layout.master == MasterKind::Float32
            && layout.weight_out.is_none()
            && layout.moments == MomentsKind::Float32
            && grad.dtype() == Dtype::Float32;
        if !is_plain {
            return Err(Error::value(format!(
                "tensor {index} is not a plain float32 parameter with float32 gradient and \
                 moments, expected one: only such steps can be undone"
            )));
        }
    }
    if hyper.betas.0 == 0.0 || hyper.betas.1 == 0.0 {
        return Err(Error::value(format!(
            "betas are `{:?}`, expected both above 0: a step without memory cannot be undone",
            hyper.betas
        )));
    }
    let inverses: Vec<Inverse> = counts.iter().map(|&count| Inverse::new(hyper, count)).collect();
    let chunks = Chunk::all(tensors.iter().map(|tensor| tensor.param.numel()));
    let lost = AtomicUsize::new(0);
    for apply in [false, true] {
        pool.run(chunks.len(), &|task| {
            let chunk = chunks[task];
            let (tensor, grad) = (&tensors[chunk.tensor], grads[chunk.tensor]);
            let range = chunk.range(tensor.param.numel());
            let moments = tensor.moments();
            // SAFETY: the caller vouches for the memory; views are disjoint, as checked, and so are
            // chunks.
            let (param, grad, exp_avg, exp_avg_sq) = unsafe {
                (
                    tensor.param.slice_mut::<f32>(range.clone()),
                    grad.slice::<f32>(range.clone()),
                    moments[0].slice_mut::<f32>(range.clone()),
                    moments[1].slice_mut::<f32>(range),
                )
            };
            lost.fetch_add(
                rollback_chunk(
                    isa,
                    &inverses[chunk.tensor],
                    apply,
                    param,
                    grad,
                    exp_avg,
                    exp_avg_sq,
                ),
                Ordering::Relaxed,
            );
        });
        let lost = lost.load(Ordering::Relaxed);
        if lost > 0 {
            return Err(Error::value(format!(
                "the step cannot be undone: `{lost}` elements do not follow from this gradient and \
                 step count; nothing was changed\nhint: a step whose gradient was not finite must \
                 not be taken in the first place"
            )));
        }
    }
    Ok(())
}

/// Elements that cannot be undone; undoes them all if `apply`.
fn rollback_chunk(
    isa: Isa,
    inverse: &Inverse,
    apply: bool,
    param: &mut [f32],
    grad: &[f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
) -> usize {
    const PIECE: usize = 1024;
    // The inverse reads and writes fp32 outside of a kernel.
    let _standard = StandardFpEnv::enter();
    let (mut p, mut m, mut v) = ([0.0; PIECE], [0.0; PIECE], [0.0; PIECE]);
    let mut lost = 0;
    for at in (0..param.len()).step_by(PIECE) {
        let piece = at..(at + PIECE).min(param.len());
        let len = piece.len();
        for (i, at) in piece.clone().enumerate() {
            (p[i], m[i], v[i]) = inverse.element(param[at], grad[at], exp_avg[at], exp_avg_sq[at]);
        }
        if apply {
            param[piece.clone()].copy_from_slice(&p[..len]);
            exp_avg[piece.clone()].copy_from_slice(&m[..len]);
            exp_avg_sq[piece].copy_from_slice(&v[..len]);
            continue;
        }
        let before = (p, m, v);
        let moments =
            Nearest::new(Cursor::in_place(&mut m[..len]), Cursor::in_place(&mut v[..len]));
        let master = Plain(Cursor::in_place(&mut p[..len]));
        update(isa, &inverse.step, &grad[piece.clone()], master, moments, Dither::new(0, 1, 0));
        lost += piece
            .enumerate()
            .filter(|&(i, at)| {
                let added = inverse.step.one_minus_beta1 * (grad[at] * inverse.step.grad_scale);
                // The update moves with the roundings of exp_avg, whose terms may cancel.
                let denom = exp_avg_sq[at].sqrt() * inverse.step.denom_scale + inverse.step.eps;
                let update = inverse.step.step_size * added.abs().max(before.1[i].abs()) / denom;
                !(is_repeated(p[i], param[at], before.0[i], update)
                    && is_repeated(m[i], exp_avg[at], before.1[i], added)
                    && is_repeated(v[i], exp_avg_sq[at], before.2[i], 0.0))
            })
            .count();
    }
    lost
}
