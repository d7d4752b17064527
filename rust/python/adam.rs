//! Adam over tensors.

use std::collections::BTreeMap;

use pyo3::prelude::*;

use super::{
    host::PyPool,
    logging::run,
    tensor::{PyTensorView, dtype_named},
};
use crate::{
    adam::{
        Hyper, batch,
        exchange::{self, StateViews},
        tensor::AdamTensor,
    },
    error::{Error, Result},
    grads::stats,
    simd::isa::Isa,
    state::{
        codecs::{MasterKind, MomentsKind},
        part::Part,
    },
    stream::element::Dtype,
};

/// One parameter of a step: where its weight, gradient and state are. The layout follows from the
/// names and dtypes of the parts that are given.
///
/// ======== ======================== ===========================================
/// param    parts of the master      master
/// ======== ======================== ===========================================
/// float32  none                     the parameter itself
/// bfloat16 trailing, fingerprints   split: exact fp32 in 2 B beside the parameter
/// bfloat16 trailing                 the same, where steps alone write the parameter
/// float16  master                   separate
/// 16-bit   none                     none: rounded to nearest
/// ======== ======================== ===========================================
///
/// Names, dtypes and lengths of all parts are those of `master_parts` and `moments_parts`. A 16-bit
/// parameter without a master has moments in float32 or in its own dtype. Zeros everywhere are a
/// fresh state. Beside a float32 parameter, `weight_out` (bfloat16 or float16) gets its rounded
/// copy.
///
/// Args:
///     param: the parameter.
///     grad: its gradient, of as many elements; a step needs it.
///     weight_out: where the rounded copy of a float32 parameter goes.
///     key: decorrelates the stochastic rounding of different parameters.
///     parts: of the state, by their names.
///
/// Raises:
///     ValueError: naming what does not fit.
#[pyclass(name = "AdamTensor", module = "stepwell._core", frozen)]
pub(super) struct PyAdamTensor(pub(super) AdamTensor);

#[pymethods]
impl PyAdamTensor {
    #[new]
    #[pyo3(signature = (*, param, grad=None, weight_out=None, key=0, **parts: "TensorView"))]
    fn new(
        param: &PyTensorView,
        grad: Option<&PyTensorView>,
        weight_out: Option<&PyTensorView>,
        key: u64,
        parts: Option<BTreeMap<String, PyRef<'_, PyTensorView>>>,
    ) -> Result<Self> {
        let view = |view: Option<&PyTensorView>| view.map(|view| view.0);
        let parts = parts.unwrap_or_default();
        let parts: Vec<_> = parts.iter().map(|(name, view)| (name.as_str(), view.0)).collect();
        AdamTensor::new(param.0, &parts, view(grad), view(weight_out), key).map(Self)
    }

    /// Number of elements.
    #[getter]
    fn numel(&self) -> usize {
        self.0.param.numel()
    }
}

/// What a step does, under torch's names.
///
/// Args:
///     lr: learning rate.
///     betas: decay of both moments.
///     eps: added to the denominator.
///     weight_decay: of the weight if `decoupled`, else of the gradient.
///     decoupled: AdamW rather than Adam with L2.
///     bias_correction: whether moments are corrected for their start at 0.
///     maximize: ascend.
///     grad_scale: multiplies every gradient: inverse loss scale times clip coefficient.
///
/// Raises:
///     ValueError: naming the one that is out of its range.
#[pyclass(name = "Hyper", module = "stepwell._core", frozen)]
pub(super) struct PyHyper(pub(super) Hyper);

#[pymethods]
impl PyHyper {
    #[new]
    #[pyo3(signature = (
        *, lr, betas, eps, weight_decay, decoupled, bias_correction=true, maximize=false,
        grad_scale=1.0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn new(
        lr: f64,
        betas: (f64, f64),
        eps: f64,
        weight_decay: f64,
        decoupled: bool,
        bias_correction: bool,
        maximize: bool,
        grad_scale: f64,
    ) -> Result<Self> {
        let hyper = Hyper {
            lr,
            betas,
            eps,
            weight_decay,
            decoupled,
            bias_correction,
            maximize,
            grad_scale,
        };
        hyper.validate()?;
        Ok(Self(hyper))
    }
}

fn tensors_of(tensors: &[PyRef<'_, PyAdamTensor>]) -> Vec<AdamTensor> {
    tensors.iter().map(|tensor| tensor.0).collect()
}

/// Steps every tensor once, in place, in one pass over each; the GIL is released.
///
/// Formula: Adam (Kingma and Ba, 2015, algorithm 1), AdamW if `decoupled` (Loshchilov and Hutter,
/// 2019, algorithm 2). Bias corrections are computed in double precision. Bits depend on neither
/// threads nor ISA.
///
/// Args:
///     tensors: each with a gradient.
///     steps: for each tensor the number of this update, from 1.
///     hyper: what to step them with.
///     pool: the default pool if None.
///
/// Raises:
///     ValueError: before anything is changed: a hyper-parameter out of range, a tensor without a
///         gradient, memory that overlaps.
#[pyfunction]
#[pyo3(signature = (tensors, *, steps, hyper, pool=None))]
pub(super) fn adam_step(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, PyAdamTensor>>,
    steps: Vec<u64>,
    hyper: &PyHyper,
    pool: Option<&PyPool>,
) -> Result<()> {
    let hyper = hyper.0;
    let tensors = tensors_of(&tensors);
    let pool = PyPool::pool(pool);
    py.detach(|| {
        let pool = pool.get()?;
        pool.claim_cpus();
        // SAFETY: the caller that made the views vouches for their memory during this call (see
        // TensorView).
        unsafe { batch::step(pool, Isa::detect()?, &tensors, &steps, &hyper) }
    })
}

/// What one read of all gradients tells.
#[pyclass(name = "GradStats", module = "stepwell._core", frozen)]
pub(super) struct PyGradStats(pub(super) stats::GradStats);

#[pymethods]
impl PyGradStats {
    /// Sum of squares in double precision, over fixed blocks: depends on neither threads nor
    /// alignment. NaN if not asked for.
    #[getter]
    fn sq_norm(&self) -> f64 {
        self.0.sq_norm
    }

    /// The largest magnitude; infinite or NaN where a value is.
    #[getter]
    fn absmax(&self) -> f32 {
        self.0.absmax
    }

    /// Whether all values are finite.
    #[getter]
    fn finite(&self) -> bool {
        self.0.first_nonfinite.is_none()
    }

    fn __repr__(&self) -> String {
        let stats::GradStats { sq_norm, absmax, first_nonfinite } = self.0;
        let first = first_nonfinite.map_or("None".to_owned(), |index| index.to_string());
        format!("GradStats(sq_norm={sq_norm}, absmax={absmax}, first_nonfinite={first})")
    }
}

/// Finite check, largest magnitude and, with `norm`, squared norm of all gradients in one read; the
/// GIL is released.
///
/// Raises:
///     ValueError: for a dtype that gradients do not have.
#[pyfunction]
#[pyo3(signature = (grads, *, norm=true, pool=None))]
pub(super) fn grad_stats(
    py: Python<'_>,
    grads: Vec<PyRef<'_, PyTensorView>>,
    norm: bool,
    pool: Option<&PyPool>,
) -> PyResult<PyGradStats> {
    let grads: Vec<_> = grads.iter().map(|grad| grad.0).collect();
    let pool = PyPool::pool(pool);
    // SAFETY: as in `adam_step`.
    run(py, || unsafe { stats::grad_stats(pool.get()?, Isa::detect()?, &grads, norm) })
        .map(PyGradStats)
}

/// `exp_avg` and `exp_avg_sq` together, or neither.
fn state_views(
    master: Option<&PyTensorView>,
    exp_avg: Option<&PyTensorView>,
    exp_avg_sq: Option<&PyTensorView>,
) -> Result<StateViews> {
    let moments = match (exp_avg, exp_avg_sq) {
        (Some(exp_avg), Some(exp_avg_sq)) => Some((exp_avg.0, exp_avg_sq.0)),
        (None, None) => None,
        _ => {
            return Err(Error::value(
                "one moment is given without the other, expected both or neither",
            ));
        }
    };
    Ok(StateViews { master: master.map(|view| view.0), moments })
}

/// Decodes a tensor's state into float32 views of `numel` elements: the master, both moments, or
/// all three.
///
/// Raises:
///     ValueError: for views of another dtype or size, that overlap, or one moment without the
///         other.
#[pyfunction]
#[pyo3(signature = (tensor, *, master=None, exp_avg=None, exp_avg_sq=None, pool=None))]
pub(super) fn read_state(
    py: Python<'_>,
    tensor: &PyAdamTensor,
    master: Option<&PyTensorView>,
    exp_avg: Option<&PyTensorView>,
    exp_avg_sq: Option<&PyTensorView>,
    pool: Option<&PyPool>,
) -> PyResult<()> {
    let (tensor, to) = (tensor.0, state_views(master, exp_avg, exp_avg_sq)?);
    let pool = PyPool::pool(pool);
    // SAFETY: as in `adam_step`.
    run(py, || unsafe { exchange::read_state(pool.get()?, Isa::detect()?, &tensor, to) })
}

/// Encodes float32 views of `numel` elements into a tensor's state; a master also writes the
/// parameter itself.
///
/// Args:
///     step: seeds the stochastic rounding; the count of updates that the moments hold.
///
/// Raises:
///     ValueError: as `read_state`.
#[pyfunction]
#[pyo3(signature = (tensor, *, step, master=None, exp_avg=None, exp_avg_sq=None, pool=None))]
pub(super) fn write_state(
    py: Python<'_>,
    tensor: &PyAdamTensor,
    step: u64,
    master: Option<&PyTensorView>,
    exp_avg: Option<&PyTensorView>,
    exp_avg_sq: Option<&PyTensorView>,
    pool: Option<&PyPool>,
) -> PyResult<()> {
    let (tensor, from) = (tensor.0, state_views(master, exp_avg, exp_avg_sq)?);
    let pool = PyPool::pool(pool);
    // SAFETY: as in `adam_step`.
    run(py, || unsafe { exchange::write_state(pool.get()?, Isa::detect()?, &tensor, step, from) })
}

/// Takes the fingerprints of a bfloat16 parameter whose trailing bits belong to it: after steps
/// without fingerprints, before other code may write the parameter.
///
/// Raises:
///     ValueError: for a tensor without fingerprints.
#[pyfunction]
#[pyo3(signature = (tensor, *, pool=None))]
pub(super) fn take_fingerprints(
    py: Python<'_>,
    tensor: &PyAdamTensor,
    pool: Option<&PyPool>,
) -> PyResult<()> {
    let tensor = tensor.0;
    let pool = PyPool::pool(pool);
    // SAFETY: as in `adam_step`.
    run(py, || unsafe { exchange::take_fingerprints(pool.get()?, Isa::detect()?, &tensor) })
}

/// One array of a parameter's state.
#[pyclass(name = "StatePart", module = "stepwell._core", frozen)]
pub(super) struct PyStatePart(Part);

#[pymethods]
impl PyStatePart {
    /// Its name: the key in a state dict.
    #[getter]
    fn name(&self) -> &'static str {
        self.0.name
    }

    /// torch's name of its dtype, without the `torch.` prefix.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.name()
    }

    /// Whether it has one entry for each element of the parameter.
    #[getter]
    fn per_element(&self) -> bool {
        self.0.is_per_element()
    }

    /// Entries for a parameter of `numel` elements.
    ///
    /// Raises:
    ///     ValueError: for more elements than there can be.
    fn length(&self, numel: usize) -> Result<usize> {
        self.0.len(numel)
    }
}

fn state_parts(parts: &[Part]) -> Vec<PyStatePart> {
    parts.iter().copied().map(PyStatePart).collect()
}

/// Names of the codecs of moments.
#[pyfunction]
pub(super) fn moments_codecs() -> Vec<&'static str> {
    MomentsKind::ALL.iter().map(|kind| kind.name()).collect()
}

/// The parts of moments in this codec.
///
/// Raises:
///     ValueError: for an unknown codec.
#[pyfunction]
pub(super) fn moments_parts(codec: &str) -> Result<Vec<PyStatePart>> {
    let kind = MomentsKind::named(codec).ok_or_else(|| {
        Error::value(format!(
            "the codec is `{codec}`, expected one of {}",
            moments_codecs().join(", ")
        ))
    })?;
    Ok(state_parts(kind.parts(Dtype::Float32)))
}

/// What is kept beside a parameter of this dtype so that all bits of its master are.
///
/// Raises:
///     ValueError: for a dtype that parameters do not have.
#[pyfunction]
pub(super) fn master_parts(dtype: &str) -> Result<Vec<PyStatePart>> {
    Ok(state_parts(MasterKind::exact(dtype_named(dtype)?)?.parts()))
}
