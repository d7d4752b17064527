//! The ledger: what each record has to be, and what may be done with it now. It does no I/O.
//!
//! A record has a committed entry. Since its last write it may have a pending one, in the other
//! slot. A commit makes all pending entries the committed ones, at once; a revert forgets them.
//!
//! ```text
//! begin_write   the record's other slot, which is void until the write has ended
//! end_write     the slot is pending, or stays void
//! begin_commit  what the entries will be
//! end_commit    they are, or the volume is broken
//! ```
//!
//! - LED-1 No write goes to a slot that holds a committed record. (With one slot, where steps are
//!   written in place, it does, and the record is void until the write has ended.)
//! - LED-2 A commit has no void record, and beside those of the last commit only records of the
//!   steps since, its own the last of them. A record may have been written several times since.
//! - LED-3 A record is not read while it is written, nor written while it is read or written.
//! - LED-4 Where it is not known what is durable, nothing is done with the volume any more.
//!
//! Cost: 76 B per record; each call looks at one record, a commit at those that were written.

use super::format::{Entry, Head};
use crate::{Error, Result};

/// Of a record that is being written; other numbers count its reads in flight.
const WRITTEN: u32 = u32::MAX;

/// What became of a record since the last commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    /// Nothing.
    Unchanged,
    /// It is being written, or a write of it has failed.
    Void,
    /// It was written.
    Written(Entry),
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Ledger {
    name: String,
    head: Head,
    slots: u32,
    committed: Box<[Entry]>,
    pending: Box<[Pending]>,
    /// The records whose `pending` is not `Unchanged`.
    changed: Vec<u32>,
    in_flight: Box<[u32]>,
    writes_in_flight: usize,
    is_committing: bool,
    /// Why nothing is done any more.
    broken: Option<String>,
}

impl Ledger {
    pub(super) fn new(name: String, head: Head, slots: u32, committed: Box<[Entry]>) -> Self {
        let num = committed.len();
        Self {
            name,
            head,
            slots,
            committed,
            pending: vec![Pending::Unchanged; num].into(),
            changed: Vec::with_capacity(num),
            in_flight: vec![0; num].into(),
            writes_in_flight: 0,
            is_committing: false,
            broken: None,
        }
    }

    /// The committed step.
    pub(super) fn step(&self) -> Option<u64> {
        self.head.step
    }

    pub(super) fn num_records(&self) -> usize {
        self.committed.len()
    }

    /// Bytes of a record.
    pub(super) fn nbytes(&self, record: usize) -> Result<u32> {
        self.committed.get(record).map(|entry| entry.nbytes).ok_or_else(|| {
            Error::value(format!(
                "record is `{record}`, expected one of the `{}` of volume `{}`",
                self.committed.len(),
                self.name
            ))
        })
    }

    /// Whether a record was written, or begun to be.
    pub(super) fn is_written(&self, record: usize) -> Result<bool> {
        self.nbytes(record)?;
        let is_committed = self.committed[record].slot != Entry::NOWHERE;
        Ok(is_committed || self.pending[record] != Pending::Unchanged)
    }

    /// From now on every call fails and says why.
    pub(super) fn break_off(&mut self, why: String) {
        self.broken.get_or_insert(why);
    }

    fn check(&self) -> Result<()> {
        match &self.broken {
            None => Ok(()),
            Some(why) => Err(Error::os(
                format!(
                    "volume `{}` is not used any more since `{why}`\nhint: open it again; it then \
                     is at its last committed step",
                    self.name
                ),
                rustix::io::Errno::IO,
            )),
        }
    }

    fn in_flight_error(&self, record: usize, what: &str) -> Error {
        let is = if self.in_flight[record] == WRITTEN { "written" } else { "read" };
        Error::value(format!(
            "record `{record}` of volume `{}` is to be {what}, and it is being {is}\nhint: wait \
             for its ticket first",
            self.name
        ))
    }

    /// What a read of the record has to find. The read is in flight until [`Ledger::end_read`].
    pub(super) fn begin_read(&mut self, record: usize) -> Result<Entry> {
        self.check()?;
        self.nbytes(record)?;
        if self.in_flight[record] == WRITTEN {
            return Err(self.in_flight_error(record, "read"));
        }
        let entry = match self.pending[record] {
            Pending::Unchanged => self.committed[record],
            Pending::Written(entry) => entry,
            Pending::Void => {
                return Err(Error::os(
                    format!(
                        "record `{record}` of volume `{}` is void: its last write has failed\n\
                         hint: write it again, or revert to the committed step",
                        self.name
                    ),
                    rustix::io::Errno::IO,
                ));
            }
        };
        if entry.slot == Entry::NOWHERE {
            return Err(Error::value(format!(
                "record `{record}` of volume `{}` was never written",
                self.name
            )));
        }
        self.in_flight[record] += 1;
        Ok(entry)
    }

    pub(super) fn end_read(&mut self, record: usize) {
        self.in_flight[record] -= 1;
    }

    /// What the record will be, but for its checksum. It is void, and its write in flight, until
    /// [`Ledger::end_write`].
    pub(super) fn begin_write(&mut self, record: usize, step: u64) -> Result<Entry> {
        self.check()?;
        let nbytes = self.nbytes(record)?;
        if self.in_flight[record] != 0 {
            return Err(self.in_flight_error(record, "written"));
        }
        if self.is_committing {
            return Err(Error::value(format!(
                "record `{record}` of volume `{}` is to be written during a commit\nhint: the \
                 next step begins after the commit",
                self.name
            )));
        }
        let slot = match self.committed[record].slot {
            0 if self.slots == 2 => 1,
            _ => 0,
        };
        if self.pending[record] == Pending::Unchanged {
            self.changed.push(record as u32);
        }
        self.pending[record] = Pending::Void;
        self.in_flight[record] = WRITTEN;
        self.writes_in_flight += 1;
        Ok(Entry { checksum: 0, generation: self.head.generation + 1, step, nbytes, slot })
    }

    /// The write has ended: the record is this now, or it has failed.
    pub(super) fn end_write(&mut self, record: usize, written: Option<Entry>) {
        self.in_flight[record] = 0;
        self.writes_in_flight -= 1;
        if let Some(entry) = written {
            self.pending[record] = Pending::Written(entry);
        }
    }

    fn check_no_writes(&self, what: &str) -> Result<()> {
        if self.writes_in_flight == 0 && !self.is_committing {
            return Ok(());
        }
        Err(Error::value(format!(
            "{what} of volume `{}` while `{}` writes are in flight{}\nhint: wait for their \
             tickets first",
            self.name,
            self.writes_in_flight,
            if self.is_committing { " and another commit" } else { "" }
        )))
    }

    /// The head of the index to be written; [`Ledger::after_commit`] has its entries.
    pub(super) fn begin_commit(&mut self, step: u64) -> Result<Head> {
        self.check()?;
        self.check_no_writes("commit")?;
        for &record in &self.changed {
            let is_since = |of: u64| self.head.step.is_none_or(|last| of > last) && of <= step;
            let what = match self.pending[record as usize] {
                Pending::Written(entry) if is_since(entry.step) => continue,
                Pending::Written(entry) => format!("was written by step `{}`", entry.step),
                _ => "is void: its last write has failed".to_owned(),
            };
            return Err(Error::value(format!(
                "step `{step}` of volume `{}` is to be committed, and record `{record}` {what}\n\
                 hint: write it again, or revert to the committed step",
                self.name
            )));
        }
        self.is_committing = true;
        Ok(Head { generation: self.head.generation + 1, step: Some(step), ..self.head })
    }

    /// What the entries are once the commit that has begun is made.
    pub(super) fn after_commit(&self) -> impl ExactSizeIterator<Item = Entry> {
        self.committed.iter().zip(&self.pending).map(|(&committed, pending)| match pending {
            Pending::Written(entry) => *entry,
            _ => committed,
        })
    }

    /// The commit is made, or it is not known whether it is.
    pub(super) fn end_commit(&mut self, outcome: &Result<Head>) {
        self.is_committing = false;
        match outcome {
            Err(error) => self.break_off(error.to_string()),
            Ok(head) => {
                self.head = *head;
                for record in self.changed.drain(..).map(|record| record as usize) {
                    let pending = std::mem::replace(&mut self.pending[record], Pending::Unchanged);
                    if let Pending::Written(entry) = pending {
                        self.committed[record] = entry;
                    }
                }
            }
        }
    }

    /// The state is the committed step's again.
    pub(super) fn revert(&mut self) -> Result<()> {
        self.check()?;
        self.check_no_writes("revert")?;
        if self.slots == 1 {
            return Err(Error::value(format!(
                "volume `{}` cannot revert: its steps are written in place (durability `none`)",
                self.name
            )));
        }
        for record in self.changed.drain(..) {
            self.pending[record as usize] = Pending::Unchanged;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::dither::mix64;

    const NUM: usize = 5;

    fn ledger(slots: u32) -> Ledger {
        let head = Head { volume: 1, generation: 1, step: None };
        Ledger::new("v".to_owned(), head, slots, vec![Entry::unwritten(100); NUM].into())
    }

    fn write(ledger: &mut Ledger, record: usize, step: u64) -> Result<Entry> {
        let entry = Entry { checksum: step, ..ledger.begin_write(record, step)? };
        ledger.end_write(record, Some(entry));
        Ok(entry)
    }

    fn commit(ledger: &mut Ledger, step: u64) -> Result<()> {
        let head = ledger.begin_commit(step)?;
        ledger.end_commit(&Ok(head));
        Ok(())
    }

    /// LED-1 and LED-2, against a model of what is committed and what is pending.
    #[test]
    fn no_write_touches_what_is_committed() {
        let mut ledger = ledger(2);
        let mut committed = [None; NUM];
        let mut pending = [None; NUM];
        let mut failed = [false; NUM];
        let mut step = 10;
        for at in 0..4000 {
            let random = mix64(at) as usize;
            let record = random % NUM;
            match random / 8 % 8 {
                0 => {
                    ledger.revert().expect("nothing in flight");
                    (pending, failed) = ([None; NUM], [false; NUM]);
                }
                1 | 2 => {
                    let done = commit(&mut ledger, step);
                    assert_eq!(done.is_err(), failed.contains(&true));
                    if done.is_ok() {
                        for record in 0..NUM {
                            committed[record] = pending[record].take().or(committed[record]);
                        }
                        assert_eq!(ledger.step(), Some(step));
                        step += 1;
                    }
                }
                3 => {
                    let entry = ledger.begin_write(record, step).expect("nothing in flight");
                    assert!(committed[record].is_none_or(|old: Entry| old.slot != entry.slot));
                    ledger.end_write(record, None);
                    (pending[record], failed[record]) = (None, true);
                }
                _ => {
                    let entry = write(&mut ledger, record, step).expect("nothing in flight");
                    assert!(committed[record].is_none_or(|old: Entry| old.slot != entry.slot));
                    (pending[record], failed[record]) = (Some(entry), false);
                }
            }
            for record in 0..NUM {
                let expected = pending[record].or(committed[record]);
                let found = ledger.begin_read(record);
                assert_eq!(
                    found.as_ref().ok(),
                    expected.filter(|_| !failed[record]).as_ref(),
                    "record {record}"
                );
                if found.is_ok() {
                    ledger.end_read(record);
                }
            }
        }
        assert!(step > 100, "{step} steps");
    }

    #[test]
    fn a_record_in_flight_is_left_alone() {
        let mut ledger = ledger(2);
        ledger.begin_write(2, 1).expect("free");
        for error in [
            ledger.begin_read(2).expect_err("written"),
            ledger.begin_write(2, 1).expect_err("written"),
            ledger.begin_commit(1).expect_err("a write in flight"),
            ledger.revert().expect_err("a write in flight"),
        ] {
            assert!(matches!(error, Error::Value(_)), "{error}");
        }
        ledger.end_write(2, None);
        ledger.begin_commit(1).expect_err("void");
        write(&mut ledger, 2, 1).expect("written again");
        ledger.begin_read(2).expect("once");
        ledger.begin_read(2).expect("twice");
        ledger.begin_write(2, 1).expect_err("read");
        ledger.end_read(2);
        ledger.begin_write(2, 1).expect_err("still read");
        ledger.end_read(2);
        ledger.begin_commit(0).expect_err("of a later step");
        ledger.begin_commit(1).expect("written");
        ledger.begin_write(2, 2).expect_err("a commit in flight");
        ledger.begin_commit(1).expect_err("a commit in flight");
    }

    /// LED-2, where a commit has several steps.
    #[test]
    fn a_commit_has_records_of_the_steps_since_the_last_one() {
        let mut ledger = ledger(2);
        write(&mut ledger, 0, 3).expect("written");
        let again = write(&mut ledger, 0, 4).expect("written");
        write(&mut ledger, 1, 5).expect("written");
        assert_eq!(ledger.begin_read(0).expect("written"), again);
        ledger.end_read(0);
        commit(&mut ledger, 5).expect("steps 3 to 5");
        for step in [4, 5] {
            write(&mut ledger, 2, step).expect("written");
            ledger.begin_commit(6).expect_err("of a step before the last commit");
        }
        let other = write(&mut ledger, 0, 6).expect("written");
        assert_ne!(other.slot, again.slot);
        assert_eq!(write(&mut ledger, 0, 7).expect("written").slot, other.slot);
        write(&mut ledger, 2, 7).expect("written");
        ledger.begin_commit(6).expect_err("of a later step");
        commit(&mut ledger, 7).expect("steps 6 and 7");
    }

    #[test]
    fn a_commit_that_failed_is_the_end() {
        let mut ledger = ledger(2);
        write(&mut ledger, 0, 1).expect("written");
        ledger.begin_commit(1).expect("written");
        ledger.end_commit(&Err(Error::os("cannot sync member `1`", rustix::io::Errno::IO)));
        for error in [
            ledger.begin_read(0).expect_err("broken"),
            ledger.begin_write(0, 1).expect_err("broken"),
            ledger.begin_commit(1).expect_err("broken"),
            ledger.revert().expect_err("broken"),
        ] {
            assert!(error.to_string().contains("cannot sync member `1`"), "{error}");
        }
    }

    #[test]
    fn in_place_there_is_one_slot_and_no_way_back() {
        let mut ledger = ledger(1);
        for step in 1..4 {
            assert_eq!(write(&mut ledger, 3, step).expect("written").slot, 0);
            commit(&mut ledger, step).expect("written");
        }
        let entry = ledger.begin_write(3, 4).expect("free");
        assert_eq!(entry.slot, 0);
        ledger.end_write(3, None);
        ledger.begin_read(3).expect_err("void: the old bits are gone");
        ledger.revert().expect_err("in place");
    }
}
