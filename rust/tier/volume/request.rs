//! A read or write of a record in flight, and who waits for it.
//!
//! - REQ-1 A request owns its memory until its last operation has ended, whatever becomes of its
//!   ticket. So no drive reads or writes memory that is someone else's by then.
//! - REQ-2 A request has one outcome: that of its first operation that failed, or success.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use super::{buffers::RecordBuffer, format::Entry, ledger::Ledger};
use crate::{
    host::memory::Buffer,
    tier::io::queue::{Failure, Outcome, lock},
};

/// What a request is for.
pub(super) enum Purpose {
    /// Of a record that has to be this.
    Read { record: usize, entry: Entry },
    /// Of a record that becomes this.
    Write { record: usize, entry: Entry },
    /// Of a copy of the index, which lies in this memory.
    Index { _memory: Arc<Mutex<Buffer>> },
    /// To make members durable.
    Sync,
}

struct State {
    /// Operations that have not ended.
    remaining: usize,
    failure: Option<Failure>,
    buffer: Option<RecordBuffer>,
}

/// See the [module](self).
pub(super) struct Request {
    pub(super) purpose: Purpose,
    ledger: Arc<Mutex<Ledger>>,
    state: Mutex<State>,
    ended: Condvar,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match &self.purpose {
            Purpose::Read { record, .. } => format!("read of record {record}"),
            Purpose::Write { record, .. } => format!("write of record {record}"),
            Purpose::Index { .. } => "write of an index".to_owned(),
            Purpose::Sync => "sync".to_owned(),
        };
        write!(f, "Request({what}, {} operations in flight)", self.state().remaining)
    }
}

impl Request {
    /// Of so many operations.
    pub(super) fn new(
        purpose: Purpose,
        operations: usize,
        buffer: Option<RecordBuffer>,
        ledger: Arc<Mutex<Ledger>>,
    ) -> Arc<Self> {
        let state = Mutex::new(State { remaining: operations, failure: None, buffer });
        Arc::new(Self { purpose, ledger, state, ended: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn is_over(&self) -> bool {
        self.state().remaining == 0
    }

    /// Its outcome once it is over, and nothing after `timeout`. Asked once.
    pub(super) fn wait(&self, timeout: Duration) -> Option<Result<Option<RecordBuffer>, Failure>> {
        let (mut state, _) = self
            .ended
            .wait_timeout_while(self.state(), timeout, |state| state.remaining > 0)
            .unwrap_or_else(PoisonError::into_inner);
        (state.remaining == 0).then(|| match state.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(state.buffer.take()),
        })
    }
}

impl Outcome for Request {
    /// The last one tells the ledger, then the waiters.
    fn end_operation(&self, failure: Option<Failure>) {
        let mut state = self.state();
        if let Some(failure) = failure {
            state.failure.get_or_insert(failure);
        }
        if state.remaining == 1 {
            let has_failed = state.failure.is_some();
            let mut ledger = lock(&self.ledger);
            match self.purpose {
                Purpose::Read { record, .. } => ledger.end_read(record),
                Purpose::Write { record, entry } => {
                    ledger.end_write(record, (!has_failed).then_some(entry));
                }
                Purpose::Index { .. } | Purpose::Sync => {}
            }
        }
        state.remaining -= 1;
        let is_over = state.remaining == 0;
        drop(state);
        if is_over {
            self.ended.notify_all();
        }
    }

    fn abandon(&self, failure: Failure) {
        std::mem::forget(self.state().buffer.take());
        self.end_operation(Some(failure));
    }
}
