//! The one error type of the crate.
//!
//! Messages are lower-case fragments: the offending value in backticks, what was expected, then a
//! hint.

use std::io;

/// What went wrong, and therefore which Python exception it becomes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that cannot work: `ValueError` in Python. Nothing was changed.
    #[error("{0}")]
    Value(String),
    /// The operating system refused: `OSError` in Python, with its errno.
    #[error("{context}: {source}")]
    Os {
        /// What was tried, with the offending value and a hint.
        context: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// An argument that cannot work.
    pub fn value(message: impl Into<String>) -> Self {
        Self::Value(message.into())
    }

    /// A system call that failed, with what was tried.
    pub fn os(context: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Os { context: context.into(), source: source.into() }
    }
}

/// `std::result::Result` with the crate's error.
pub type Result<T> = std::result::Result<T, Error>;
