//! The weights that a step is about to write, for their contents to be compared with what was
//! uploaded.

use pyo3::{intern, prelude::*};

use super::{PyStore, atomic::Atomic, torch::address};
use crate::{offload::Weight, python::offload::stream_of};

impl PyStore {
    /// See [`PyStore::take_checksums`].
    pub(super) fn take_checksums_at(slf: Bound<'_, Self>, sums: u64, stream: u64) -> PyResult<()> {
        let py = slf.py();
        let (engine, weights) = {
            let store = slf.borrow();
            let _atomic = Atomic::begin(py, &store.torch.disable_torch_function)?;
            (store.engine(py)?, store.weights(py)?)
        };
        // SAFETY: Stepwell's Python holds the tensor of the sums, and the program has its weights.
        py.detach(|| unsafe { engine.get().weight_checksums(&weights, sums, stream_of(stream)) })?;
        Ok(())
    }

    /// Where the weights are that come with the step, in the order of the engine's tensors.
    fn weights(&self, py: Python<'_>) -> PyResult<Vec<Weight>> {
        let mut weights = Vec::new();
        for (index, at) in self.landing() {
            let span = &self.spans[index];
            let Some(binding) = &span.binding else { continue };
            let Some(tensor) = binding.tensor else { continue };
            let (param, size) = (span.param.bind(py), tensor.param.dtype().size());
            let piece = at.and_then(|at| self.looked[at].piece.as_ref());
            let address = match piece {
                Some(piece) => address(piece.bind(py))?,
                // Of a DTensor that has no gradient now.
                None => match param.getattr_opt(intern!(py, "_local_tensor"))? {
                    Some(local) => address(&local)?,
                    None => address(param)? + binding.whole.1 * size,
                },
            };
            weights.push(Weight { index, address: address as u64, size });
        }
        weights.sort_unstable_by_key(|weight| weight.index);
        Ok(weights)
    }
}
