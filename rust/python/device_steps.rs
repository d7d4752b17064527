//! Steps of parameters whose state stays on the device.

use std::sync::Arc;

use pyo3::prelude::*;

use super::{adam::PyHyper, tensor::dtypes_named};
use crate::{
    adam::{
        Hyper, Step,
        selected::{Shape, WeightKind},
    },
    device::{self, Attached, Channels, Device, Stream, by_step},
    error::{Error, Result},
    stream::element::Dtype,
};

/// Elements of the largest parameter that the device's kernel counts.
const NUMEL_MAX: usize = (1 << 31) - 1;

/// Steps Adam on a device, over parameters whose state is there.
///
/// The state of a parameter is one piece of memory: master, `exp_avg` and `exp_avg_sq`, as many
/// fp32 as it has elements each, and a 32-bit 0 behind them. A weight that differs from its rounded
/// master was written by the program. It becomes the master before the step. Bits are those of a
/// step in host memory with fp32 moments, but for the payload of a NaN. A step reads and writes 12
/// bytes of state per parameter and its weight, and reads its gradient.
///
/// Args:
///     device: "cuda:N", or "cpu": then the calling thread steps.
///
/// Raises:
///     ValueError: for another device.
///     OSError: where there is no such device, or its driver does not compile the kernel.
#[pyclass(name = "DeviceSteps", module = "stepwell._core", frozen)]
pub(super) struct PyDeviceSteps {
    device: Arc<dyn Device>,
}

/// How the master of a parameter of this dtype becomes its weight.
fn kind_of(dtype: Dtype) -> Result<WeightKind> {
    match dtype {
        Dtype::Float32 => Ok(WeightKind::Float32),
        Dtype::BFloat16 => Ok(WeightKind::Split),
        Dtype::Float16 => Ok(WeightKind::Float16),
        other => Err(Error::value(format!(
            "a parameter is `{other}`, expected float32, bfloat16 or float16"
        ))),
    }
}

#[pymethods]
impl PyDeviceSteps {
    #[new]
    fn new(py: Python<'_>, device: &str) -> Result<Self> {
        let device = py.detach(|| device::open(device, 0))?;
        py.detach(|| device.prepare_channels())?;
        Ok(Self { device })
    }

    /// Bytes of the state of a parameter with so many elements; None: it has too many.
    #[staticmethod]
    pub(super) fn state_nbytes(numel: usize) -> Option<usize> {
        (numel <= NUMEL_MAX).then(|| whole(numel).nbytes())
    }

    /// Steps each parameter once, in the order of `stream`.
    ///
    /// Args:
    ///     weights: addresses of the parameters on the device, each contiguous.
    ///     grads: of their gradients, likewise, of the same dtypes.
    ///     states: of their state, multiples of 4. All memory stays as it is until the stream is
    ///         beyond the step, and none is named twice.
    ///     numels: elements of each.
    ///     dtypes: of each.
    ///     steps: which update of each it is, from 1.
    ///     hypers: the options of each.
    ///     stream: a stream of the device.
    ///
    /// Raises:
    ///     ValueError: with nothing stepped, for lists of other lengths, or what they cannot have.
    ///     OSError: where the device has failed: then some are stepped, and some are not.
    #[pyo3(signature = (weights, grads, states, *, numels, dtypes, steps, hypers, stream=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn step(
        &self,
        py: Python<'_>,
        weights: Vec<u64>,
        grads: Vec<u64>,
        states: Vec<u64>,
        numels: Vec<usize>,
        dtypes: Vec<String>,
        steps: Vec<u64>,
        hypers: Vec<PyRef<'_, PyHyper>>,
        stream: u64,
    ) -> Result<()> {
        let dtypes = dtypes_named(dtypes)?;
        let lengths =
            [weights.len(), grads.len(), states.len(), numels.len(), dtypes.len(), steps.len()];
        if lengths.iter().any(|&length| length != hypers.len()) || steps.contains(&0) {
            return Err(Error::value(format!(
                "lists have `{lengths:?}` entries and steps are `{steps:?}`, expected one for each \
                 of {} hypers, from 1",
                hypers.len()
            )));
        }
        let mut blocks = Vec::with_capacity(hypers.len());
        for (at, hyper) in hypers.iter().enumerate() {
            let memory = Memory { weight: weights[at], grad: grads[at], state: states[at] };
            blocks.push(block_of(memory, numels[at], dtypes[at], steps[at], &hyper.0)?);
        }
        py.detach(|| self.launch(blocks, stream))
    }
}

/// Where what the device steps of a parameter is.
pub(super) struct Memory {
    pub(super) weight: u64,
    pub(super) grad: u64,
    pub(super) state: u64,
}

/// A parameter of a launch, with its gradient.
pub(super) type Block = (Step, (Channels, u64));

/// What steps `numel` elements of this dtype, as the `count`th update.
///
/// # Errors
/// [`Error::Value`] for what no launch can have.
pub(super) fn block_of(
    memory: Memory,
    numel: usize,
    dtype: Dtype,
    count: u64,
    hyper: &Hyper,
) -> Result<Block> {
    let Memory { weight, grad, state } = memory;
    if numel > NUMEL_MAX || !state.is_multiple_of(4) {
        return Err(Error::value(format!(
            "a parameter has `{numel}` elements and its state is at `{state:#x}`, expected \
             {NUMEL_MAX} at most, at a multiple of 4"
        )));
    }
    let kind = kind_of(dtype)?;
    let channels = Channels { shape: whole(numel), kind, weight, state, follows_weight: true };
    Ok((Step::new(hyper, count), (channels, grad)))
}

impl PyDeviceSteps {
    /// Launches a step of these parameters on `stream`.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed: then some are stepped, and some are not.
    pub(super) fn launch(&self, blocks: Vec<Block>, stream: u64) -> Result<()> {
        // SAFETY: the caller in Python vouches that it is a stream of the device, and alive.
        let stream = unsafe { Stream::new(stream) };
        let _attached = Attached::to(&*self.device)?;
        for (step, blocks) in &by_step(blocks.into_iter()) {
            // SAFETY: the caller in Python vouches for the memory, as documented.
            unsafe { self.device.step_channels(stream, blocks, step)? };
        }
        Ok(())
    }
}

/// All of a parameter, as one selected row.
fn whole(numel: usize) -> Shape {
    Shape { rows: 1, row_len: numel, count: 1, by_columns: false }
}
