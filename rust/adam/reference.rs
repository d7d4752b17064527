//! Adam(W) in float64, one element at a time, as the papers write it: the oracle that the kernels
//! are tested against.
//!
//! Shares nothing with the kernel but [`Hyper`].

use super::Hyper;

/// One element's master and moments.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element64 {
    /// The parameter.
    pub master: f64,
    /// The decayed mean of its gradients.
    pub exp_avg: f64,
    /// The decayed mean of their squares.
    pub exp_avg_sq: f64,
}

/// Update number `count` (from 1) of one element.
#[must_use]
pub fn update(hyper: &Hyper, count: u64, element: Element64, grad: f64) -> Element64 {
    let (beta1, beta2) = hyper.betas;
    let mut grad = grad * hyper.grad_scale;
    if hyper.maximize {
        grad = -grad;
    }
    let mut master = element.master;
    // As torch has it: an infinite weight stays infinite, and does not become 0 * infinity where
    // there is no decay.
    if hyper.decoupled {
        master *= 1.0 - hyper.lr * hyper.weight_decay;
    } else if hyper.weight_decay != 0.0 {
        grad += hyper.weight_decay * master;
    }
    let exp_avg = beta1 * element.exp_avg + (1.0 - beta1) * grad;
    let exp_avg_sq = beta2 * element.exp_avg_sq + (1.0 - beta2) * grad * grad;
    let (correction1, correction2) = if hyper.bias_correction {
        (1.0 - beta1.powf(count as f64), 1.0 - beta2.powf(count as f64))
    } else {
        (1.0, 1.0)
    };
    let (mean, variance) = (exp_avg / correction1, exp_avg_sq / correction2);
    Element64 {
        master: master - hyper.lr * mean / (variance.sqrt() + hyper.eps),
        exp_avg,
        exp_avg_sq,
    }
}
