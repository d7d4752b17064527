//! The weights that a step is about to write, for their contents to be compared with what was
//! uploaded.

use pyo3::{intern, prelude::*};

use super::{
    PyStore,
    atomic::Atomic,
    torch::{Dense, address, dense},
};
use crate::{offload::Weight, python::offload::stream_of};

impl PyStore {
    /// See [`PyStore::take_checksums`].
    pub(super) fn take_checksums_at(
        slf: Bound<'_, Self>,
        sums: u64,
        stream: u64,
    ) -> PyResult<Vec<usize>> {
        let py = slf.py();
        let (engine, weights, moved) = {
            let store = slf.borrow();
            let _atomic = Atomic::begin(py, &store.torch.disable_torch_function)?;
            let (weights, moved) = store.weights(py)?;
            (store.engine(py)?, weights, moved)
        };
        // SAFETY: Stepwell's Python holds the tensor of the sums, and the program has its weights.
        py.detach(|| unsafe { engine.get().weight_checksums(&weights, sums, stream_of(stream)) })?;
        Ok(moved)
    }

    /// Where the weights are that come with the step, in the order of the engine's tensors; and the
    /// spans of those that are not what they were: of another size, dtype or device.
    fn weights(&self, py: Python<'_>) -> PyResult<(Vec<Weight>, Vec<usize>)> {
        let (mut weights, mut moved) = (Vec::new(), Vec::new());
        for (index, at) in self.landing() {
            let span = &self.spans[index];
            let Some(binding) = &span.binding else { continue };
            let Some(tensor) = binding.hosted() else { continue };
            let (param, size) = (span.param.bind(py), tensor.param.dtype().size());
            let piece = at.and_then(|at| self.looked[at].piece.as_ref());
            let begin = match (piece, at) {
                (Some(piece), _) => Some(address(piece.bind(py))?),
                // It was looked at for the step.
                (None, Some(_)) => Some(address(param)?),
                // It has no gradient now, and a program may have done anything to it.
                (None, None) => {
                    let local = param.getattr_opt(intern!(py, "_local_tensor"))?;
                    let numel = if local.is_some() { tensor.param.numel() } else { binding.numel };
                    let found = dense(local.as_ref().unwrap_or(param))?;
                    found
                        .filter(|found| self.is_as(found, tensor.param.dtype(), numel))
                        .map(|found| found.address)
                }
            };
            match begin {
                Some(begin) => weights.push(Weight { index, address: begin as u64, size }),
                None => moved.push(index),
            }
        }
        weights.sort_unstable_by_key(|weight| weight.index);
        Ok((weights, moved))
    }

    fn is_as(&self, found: &Dense, dtype: crate::stream::element::Dtype, numel: usize) -> bool {
        found.dtype == dtype
            && found.nbytes == numel * dtype.size()
            && self.beside.as_ref().is_some_and(|beside| found.is_cpu == beside.is_on_cpu)
    }
}
