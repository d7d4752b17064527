//! Python objects that are alive.

use std::collections::HashSet;

use pyo3::{
    prelude::*,
    types::{PyList, PyType},
};

/// The objects whose classes these are, as far as the collector knows them.
///
/// A class is told by its identity: an object is not asked for it, and a class needs no hash.
/// `gc.get_objects` in a program would hold tuples that other threads are making, which Python
/// then cannot end. Here no other thread runs while they are held.
///
/// Args:
///     classes: the classes. Those beneath them are others.
#[pyfunction]
pub(super) fn instances_alive(
    py: Python<'_>,
    classes: Vec<Bound<'_, PyType>>,
) -> PyResult<Vec<Py<PyAny>>> {
    let known: HashSet<_> = classes.iter().map(|class| class.as_type_ptr()).collect();
    let objects = py.import("gc")?.call_method0("get_objects")?.cast_into::<PyList>()?;
    let is_known = |object: &Bound<'_, PyAny>| known.contains(&object.get_type_ptr());
    Ok(objects.iter().filter(is_known).map(Bound::unbind).collect())
}
