//! Parameters whose state is on the device, which steps them: they are spans beside those of the
//! engine, and their gradients are looked at with the others.

use pyo3::{exceptions::PyValueError, prelude::*};

use super::{
    PyStore,
    look::Looked,
    py_drop,
    span::{OnDevice, Place, Span},
    step::moved,
    torch::{address, dense, storage},
};
use crate::{
    error::Error,
    python::{
        adam::PyHyper,
        device_steps::{Block, Memory, PyDeviceSteps, block_of},
    },
};

impl PyStore {
    /// See [`PyStore::set_residents`].
    pub(super) fn set_residents_to(
        &mut self,
        py: Python<'_>,
        params: &[Bound<'_, PyAny>],
        steps: Option<Py<PyDeviceSteps>>,
    ) -> PyResult<()> {
        self.device_steps = steps;
        let known = self.spans.iter().filter(|span| span.is_resident);
        if known.map(|span| span.param.as_ptr()).eq(params.iter().map(Bound::as_ptr)) {
            return Ok(());
        }
        if let (Some(beside), Some(param)) = (&mut self.beside, params.first()) {
            beside.is_on_cpu = param.getattr("is_cpu")?.is_truthy()?;
        }
        let (left, hosted): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.spans).into_iter().partition(|span| span.is_resident);
        self.spans = hosted;
        self.by_param.retain(|_, span| *span < self.spans.len());
        let looked = std::mem::take(&mut self.looked);
        self.written = None;
        for param in params {
            self.insert(param, true);
        }
        py_drop(py, (left, looked));
        Ok(())
    }

    /// See [`PyStore::bind_on_device`].
    #[expect(clippy::too_many_arguments, reason = "as the face has it")]
    pub(super) fn bind_resident(
        &mut self,
        py: Python<'_>,
        position: usize,
        grad: Bound<'_, PyAny>,
        memory: &Bound<'_, PyAny>,
        state: Bound<'_, PyAny>,
        piece: Option<Bound<'_, PyAny>>,
        is_kept: bool,
    ) -> PyResult<()> {
        let span = &self.spans[self.position(position)?.span];
        let dense = dense(&grad)?;
        let nbytes = memory.getattr("nbytes")?.extract()?;
        let place = dense.filter(|dense| {
            let numel = dense.nbytes / dense.dtype.size();
            span.is_resident && PyDeviceSteps::state_nbytes(numel) == Some(nbytes)
        });
        let Some(dense) = place else {
            return Err(PyValueError::new_err(format!(
                "a gradient is not that of a resident with `{nbytes}` bytes of state"
            )));
        };
        let on_device = OnDevice {
            address: address(memory)? as u64,
            dtype: dense.dtype,
            storage: storage(memory)?,
        };
        let (place, parts) = (Place::Device(on_device), vec![]);
        self.bind_place(py, position, place, grad, state, parts, piece, None, is_kept, vec![])
    }

    /// What the last look has found of these.
    pub(super) fn residents_looked(&self) -> impl Iterator<Item = &Looked> {
        self.looked.iter().filter(|one| self.spans[one.span].is_resident)
    }

    /// The blocks of their launch.
    pub(super) fn blocks(
        &self,
        py: Python<'_>,
        hypers: &[PyRef<'_, PyHyper>],
    ) -> PyResult<Vec<Block>> {
        let mut blocks = Vec::new();
        for one in self.residents_looked() {
            let Span { param, binding: Some(binding), .. } = &self.spans[one.span] else {
                continue;
            };
            let Place::Device(on_device) = &binding.place else { continue };
            let weight = match (&one.piece, binding.weight) {
                (None, Some(weight)) => weight,
                (piece, _) => address(piece.as_ref().unwrap_or(param).bind(py))?,
            };
            let hyper = hypers.get(one.group).ok_or_else(|| {
                Error::value(format!("hypers has `{}` groups, expected more", hypers.len()))
            })?;
            let memory = Memory {
                weight: weight as u64,
                grad: one.grad_address as u64,
                state: on_device.address,
            };
            let count = binding.counter.count().ok_or_else(moved)? + 1;
            blocks.push(block_of(memory, binding.numel, on_device.dtype, count, &hyper.0)?);
        }
        Ok(blocks)
    }
}
