//! A step of parameters in host memory.

use pyo3::{prelude::*, types::PyList};

use super::{
    PyStore,
    atomic::Atomic,
    look::Looked,
    py_drop,
    torch::{is_at, storage},
};
use crate::{
    adam::{
        Hyper,
        batch::{self, Batch},
    },
    error::Error,
    python::{adam::PyHyper, host::PyPool},
    simd::isa::Isa,
};

/// What STORE-3 says.
pub(super) fn moved() -> Error {
    Error::value(
        "a parameter or a gradient was given other memory while its step was made ready, and \
         nothing was changed\n\
         hint: assign to parameters and gradients before step(), or write them in place",
    )
}

impl PyStore {
    /// See [`PyStore::step`].
    pub(super) fn step_all(slf: Bound<'_, Self>, hypers: Vec<PyRef<'_, PyHyper>>) -> PyResult<()> {
        let py = slf.py();
        let hypers: Vec<_> = hypers.iter().map(|hyper| hyper.0).collect();
        let (batches, owners) = {
            let store = slf.borrow();
            let _atomic = Atomic::begin(py, &store.torch.disable_torch_function)?;
            store.check_in_place(py)?;
            (store.batches(&hypers)?, store.owners(py)?)
        };
        let pool = PyPool::pool(None);
        py.detach(|| {
            let pool = pool.get()?;
            pool.claim_cpus();
            // SAFETY: the storages of all memory are held; the program vouches that it uses none of
            // it meanwhile.
            unsafe { batch::step_batches(pool, Isa::detect()?, &batches) }
        })?;
        let mut store = slf.borrow_mut();
        let stepped = {
            let _atomic = Atomic::begin(py, &store.torch.disable_torch_function)?;
            store.count(py)?;
            store.has_left = false;
            std::mem::take(&mut store.looked)
        };
        drop(store);
        py_drop(py, (stepped, owners));
        Ok(())
    }

    /// The gradients of the last look with what steps them.
    ///
    /// # Errors
    /// ValueError where one was given other memory since.
    pub(super) fn check_in_place(&self, py: Python<'_>) -> PyResult<()> {
        for one in &self.looked {
            let Looked { span, grad, is_ready, piece, .. } = one;
            let span = &self.spans[*span];
            // A signal's handler may have loaded another state.
            let Some(binding) = &span.binding else { return Err(moved().into()) };
            let is_moved = match binding.weight {
                Some(weight) if piece.is_none() => !is_at(span.param.bind(py), weight),
                _ => false,
            };
            if !is_ready || is_moved || !is_at(grad.bind(py), one.grad_address) {
                return Err(moved().into());
            }
        }
        Ok(())
    }

    fn batches(&self, hypers: &[Hyper]) -> PyResult<Vec<Batch>> {
        let mut batches: Vec<Batch> = hypers.iter().map(|&hyper| Batch::new(hyper)).collect();
        for looked in &self.looked {
            let Some(binding) = &self.spans[looked.span].binding else { continue };
            let Some(view) = looked.grad_view else { continue };
            let Some(mut tensor) = binding.tensor(true) else { continue };
            tensor.grad = Some(view);
            let batch = batches.get_mut(looked.group).ok_or_else(|| {
                Error::value(format!("hypers has `{}` groups, expected more", hypers.len()))
            })?;
            batch.tensors.push(tensor);
            batch.counts.push(binding.counter.count().map_or(0, |count| count + 1));
        }
        Ok(batches)
    }

    fn owners(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let mut owners = Vec::new();
        for looked in &self.looked {
            let span = &self.spans[looked.span];
            owners.push(storage(looked.grad.bind(py))?);
            if let Some(binding) = &span.binding {
                owners.extend(binding.storages(py));
                if binding.weight.is_some() {
                    owners.push(storage(span.param.bind(py))?);
                }
            }
        }
        Ok(owners)
    }

    /// Counts the update of each state of the last look: once, also where spans share it.
    pub(super) fn count_updates(&mut self, py: Python<'_>) -> PyResult<()> {
        for (looked, number) in self.looked.iter().zip(self.numbers_of_updates()) {
            if let Some(binding) = &mut self.spans[looked.span].binding {
                binding.counter.set(number, binding.state.bind(py))?;
            }
        }
        Ok(())
    }

    /// Ends the step of the last look: what was copied is copied back, updates are counted, and
    /// autograd is told.
    fn count(&mut self, py: Python<'_>) -> PyResult<()> {
        let written = PyList::empty(py);
        for looked in &self.looked {
            let span = &self.spans[looked.span];
            let Some(binding) = &span.binding else { continue };
            for call in &binding.write_backs {
                call.bind(py).call0()?;
            }
            written.append(&span.param)?;
            if let Some(piece) = &looked.piece {
                written.append(piece)?;
            }
        }
        self.count_updates(py)?;
        self.torch.increment_version(&written)
    }
}
