//! Adam and AdamW: one pass from gradient to weight.
//!
//! [`kernel`] holds the arithmetic, written once; [`through`] takes several gradients through one
//! pass of it; [`batch`] splits the parameters of a step into chunks and runs them on the pool;
//! [`exchange`] converts a state to fp32 and back; [`selected`] steps rows or columns apart from
//! their tensor; [`mod@reference`] is the naive float64 oracle of the tests.
//!
//! Every scalar of a step comes from IEEE operations alone, as the kernel's results do: no `pow`,
//! `exp` or `ln` of a libm, whose last bit may differ from machine to machine.
//!
//! Cost per parameter, fp32 moments: fp32 reads 16 B and writes 12 B; `split` with a bf16 gradient
//! reads 14 B and writes 12 B; `q8` reads 8.1 B and writes 6.1 B, scales included.

pub mod batch;
mod bias_correction;
pub mod ceiling;
pub mod exchange;
pub mod kernel;
pub mod reference;
pub mod selected;
pub mod tensor;
pub mod through;

use std::hint::black_box;

use self::bias_correction::bias_correction;
use crate::{
    error::{Error, Result},
    simd::fp_env::StandardFpEnv,
};

/// What a step does, as torch's optimizers name it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Learning rate.
    pub lr: f64,
    /// Decay of `exp_avg` and of `exp_avg_sq`.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Strength of the weight decay.
    pub weight_decay: f64,
    /// Decay the weight itself (AdamW: Loshchilov and Hutter, 2019, algorithm 2) instead of the
    /// gradient (Adam with L2).
    pub decoupled: bool,
    /// Correct the moments for their start at zero (Kingma and Ba, 2015, section 3).
    pub bias_correction: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
    /// Every gradient is multiplied by it: inverse loss scale times clip coefficient.
    pub grad_scale: f64,
}

impl Default for Hyper {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: true,
            bias_correction: true,
            maximize: false,
            grad_scale: 1.0,
        }
    }
}

impl Hyper {
    /// Checks that a step with these values is defined.
    ///
    /// # Errors
    /// [`Error::Value`] naming the first that is not.
    pub fn validate(&self) -> Result<()> {
        let Self { lr, betas: (beta1, beta2), eps, weight_decay, grad_scale, .. } = *self;
        let not_negative = |value: f64| value.is_finite() && value >= 0.0;
        let checks = [
            (lr.is_finite(), "lr", lr, "a finite number"),
            ((0.0..1.0).contains(&beta1), "betas[0]", beta1, "0 <= beta < 1"),
            ((0.0..1.0).contains(&beta2), "betas[1]", beta2, "0 <= beta < 1"),
            (not_negative(eps), "eps", eps, "a finite number >= 0"),
            (weight_decay.is_finite(), "weight_decay", weight_decay, "a finite number"),
            (grad_scale.is_finite(), "grad_scale", grad_scale, "a finite number"),
        ];
        match checks.into_iter().find(|(holds, ..)| !holds) {
            None => Ok(()),
            Some((_, name, value, expected)) => {
                Err(Error::value(format!("{name} is `{value}`, expected {expected}")))
            }
        }
    }
}

/// The scalars of one parameter's step, derived in double precision and rounded once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The count of this update, from 1.
    pub count: u64,
    pub(crate) grad_scale: f32,
    /// `1 - lr * weight_decay`, or 1.
    pub(crate) weight_keep: f32,
    /// The L2 term, and whether there is one: 0 times an infinite weight must not make the gradient
    /// a NaN.
    pub(crate) l2: f32,
    pub(crate) has_l2: bool,
    pub(crate) beta1: f32,
    pub(crate) one_minus_beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) one_minus_beta2: f32,
    /// `lr / (1 - beta1^t)`.
    pub(crate) step_size: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub(crate) denom_scale: f32,
    pub(crate) eps: f32,
}

impl Step {
    /// The scalars of update number `count` (from 1).
    #[must_use]
    pub fn new(hyper: &Hyper, count: u64) -> Self {
        let _standard = StandardFpEnv::enter();
        // Kept between the two writes of the control register, which arithmetic alone is not
        // ordered with.
        black_box(Self::derive(&black_box(*hyper), count))
    }

    /// The scalars in the order in which `channels.ptx` takes them.
    pub(crate) fn scalars(&self) -> [f32; 10] {
        [
            self.grad_scale,
            self.weight_keep,
            self.l2,
            self.beta1,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            -self.step_size,
            self.denom_scale,
            self.eps,
        ]
    }

    /// Whether both step every element to the same bits: zeros of the other sign are other scalars.
    pub(crate) fn steps_alike(&self, other: &Self) -> bool {
        let bits = |step: &Self| (step.has_l2, step.scalars().map(f32::to_bits));
        bits(self) == bits(other)
    }

    fn derive(hyper: &Hyper, count: u64) -> Self {
        let Hyper { lr, betas: (beta1, beta2), eps, weight_decay, .. } = *hyper;
        let correction =
            |beta| if hyper.bias_correction { bias_correction(beta, count) } else { 1.0 };
        let has_l2 = !hyper.decoupled && weight_decay != 0.0;
        Self {
            count,
            grad_scale: (if hyper.maximize { -hyper.grad_scale } else { hyper.grad_scale }) as f32,
            weight_keep: if hyper.decoupled { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            l2: if has_l2 { weight_decay as f32 } else { 0.0 },
            has_l2,
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            step_size: (lr / correction(beta1)) as f32,
            denom_scale: (1.0 / correction(beta2).sqrt()) as f32,
            eps: eps as f32,
        }
    }
}
