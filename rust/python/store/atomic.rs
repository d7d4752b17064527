//! What makes a call of C one step to all Python code: nothing of Python runs in it.

use pyo3::{ffi, prelude::*};

/// While it lives no garbage is collected, and attributes of tensors are read by torch itself,
/// whatever torch function mode the program has set. A garbage collection would run finalizers, and
/// between any two of their instructions a signal's handler, or another thread.
pub(super) struct Atomic<'py> {
    function_mode: Bound<'py, PyAny>,
    was_collecting: bool,
}

impl<'py> Atomic<'py> {
    /// Begins a stretch without Python.
    ///
    /// # Errors
    /// Whatever torch raises.
    pub(super) fn begin(py: Python<'py>, disable_torch_function: &Py<PyAny>) -> PyResult<Self> {
        let function_mode = disable_torch_function.bind(py).call0()?;
        function_mode.call_method0("__enter__")?;
        // SAFETY: the interpreter is this thread's, as `py` shows.
        let was_collecting = unsafe { ffi::PyGC_Disable() } == 1;
        Ok(Self { function_mode, was_collecting })
    }
}

impl Drop for Atomic<'_> {
    fn drop(&mut self) {
        if self.was_collecting {
            // SAFETY: the interpreter is this thread's, as the field of this lifetime shows.
            unsafe { ffi::PyGC_Enable() };
        }
        let none = self.function_mode.py().None();
        // It restores a flag of this thread's, and cannot fail.
        let _ = self.function_mode.call_method1("__exit__", (&none, &none, &none));
    }
}
