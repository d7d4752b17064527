//! The one place where the crate's errors become Python's.

use pyo3::{
    exceptions::{PyOSError, PyValueError},
    prelude::*,
};

use crate::error::Error;

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match &error {
            Error::Value(_) => PyValueError::new_err(error.to_string()),
            // With its errno, Python picks the subclass: PermissionError, FileNotFoundError ...
            Error::Os { context, source } => match source.raw_os_error() {
                Some(errno) => PyOSError::new_err((errno, format!("{context}: {source}"))),
                None => PyOSError::new_err(error.to_string()),
            },
        }
    }
}
