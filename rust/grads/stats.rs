//! Norm and finite check over all gradients of a step, on the pool.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{
    error::Result,
    grads::norm::{self, NORM_BLOCK},
    host::pool::Pool,
    simd::isa::Isa,
    state::chunk::{CHUNK_LEN, Chunk},
    stream::{
        element::{Bf16, Dtype, Element, F16},
        view::View,
    },
};

/// What one read of a gradient tells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradStats {
    /// The sum of squares in double precision; NaN if it was not asked for.
    pub sq_norm: f64,
    /// The largest magnitude; infinite or NaN where a value is.
    pub absmax: f32,
    /// The first tensor that holds a value that is not finite.
    pub first_nonfinite: Option<usize>,
}

/// Largest magnitude and, if `with_norm`, squared norm over all gradients.
///
/// # Safety
/// The memory of all views is alive, and nothing writes to it during the call.
///
/// # Errors
/// [`crate::Error::Value`] for a dtype that gradients do not have.
pub unsafe fn grad_stats(
    pool: &Pool,
    isa: Isa,
    grads: &[View],
    with_norm: bool,
) -> Result<GradStats> {
    for grad in grads {
        grad.expect("grad", &[Dtype::Float32, Dtype::BFloat16, Dtype::Float16], grad.numel())?;
    }
    const SUMS: usize = CHUNK_LEN / NORM_BLOCK;
    let chunks = Chunk::all(grads.iter().map(View::numel));
    let magnitudes: Vec<AtomicU32> = grads.iter().map(|_| AtomicU32::new(0)).collect();
    let sums: Vec<[AtomicU64; SUMS]> =
        if with_norm { chunks.iter().map(|_| Default::default()).collect() } else { Vec::new() };
    pool.run(chunks.len(), &|task| {
        let chunk = chunks[task];
        let grad = grads[chunk.tensor];
        let range = chunk.range(grad.numel());
        let mut local = [0.0; SUMS];
        let local = &mut local[..if with_norm { range.len().div_ceil(NORM_BLOCK) } else { 0 }];
        // SAFETY: the caller vouches for the memory.
        let magnitude = unsafe {
            match grad.dtype() {
                Dtype::BFloat16 => read_grad(isa, grad.slice::<Bf16>(range), local, with_norm),
                Dtype::Float16 => read_grad(isa, grad.slice::<F16>(range), local, with_norm),
                _ => read_grad(isa, grad.slice::<f32>(range), local, with_norm),
            }
        };
        magnitudes[chunk.tensor].fetch_max(magnitude, Ordering::Relaxed);
        for (sum, local) in sums.get(task).into_iter().flatten().zip(local) {
            sum.store(local.to_bits(), Ordering::Relaxed);
        }
    });
    let magnitudes: Vec<u32> = magnitudes.into_iter().map(AtomicU32::into_inner).collect();
    let sq_norm =
        sums.iter().flatten().map(|sum| f64::from_bits(sum.load(Ordering::Relaxed))).sum();
    Ok(GradStats {
        sq_norm: if with_norm { sq_norm } else { f64::NAN },
        absmax: f32::from_bits(magnitudes.iter().copied().max().unwrap_or(0)),
        first_nonfinite: magnitudes.iter().position(|&bits| bits >= f32::INFINITY.to_bits()),
    })
}

fn read_grad<G: Element>(isa: Isa, grad: &[G], sums: &mut [f64], with_norm: bool) -> u32 {
    if with_norm { norm::magnitude_and_norm(isa, grad, sums) } else { norm::magnitude(isa, grad) }
}
