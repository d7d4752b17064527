//! What this process tells the others of its host: memory that it is about to take, and the CPUs
//! that it steps on.
//!
//! - CLAIM-1 Memory is claimed before it is taken: at once what an optimizer announces
//!   ([`announce`]), and every buffer of megabytes beyond that. What others have claimed counts as
//!   used. A claim shrinks as its pages are faulted in: no byte counts twice.
//! - CLAIM-2 Of two processes that claim the same memory at the same time, at most one gets it.
//! - CLAIM-3 A claim ends with its process, however that ends (`claims/table.rs`).
//! - CLAIM-4 A control group's limit is shared with processes of that group only.
//!
//! Processes that see each other are those of one user with the same `/dev/shm`, or the same folder
//! in [`FOLDER_VARIABLE`]. Where that folder cannot be used, each counts on all that is free, and
//! the log says so.
//!
//! Cost: of a claim, what it costs to read what is free, and some system calls per process of the
//! host; one more for each 256 MiB that are faulted in.

mod table;

use std::{
    collections::BTreeSet,
    path::PathBuf,
    process,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::io::Errno;

use crate::host::{
    environment, fork,
    free_memory::{self, Limit},
    topology::format_cpu_list,
};
use crate::{Error, Result};
use table::{Entry, Table};

/// The folder in which processes tell each other.
pub const FOLDER_VARIABLE: &str = "STEPWELL_CLAIMS_FOLDER";
const FOLDER: &str = "/dev/shm";

/// What can still be taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// What the host, or the control group that leaves the least, has free; `None` where the system
    /// does not say.
    pub free_bytes: Option<u64>,
    /// What this process has claimed of that, and not taken yet.
    pub own_bytes: u64,
    /// What other processes have.
    pub others_bytes: u64,
    /// Those processes, by number.
    pub others: Vec<u32>,
}

impl Room {
    /// What nobody has claimed; `None` where the system does not say.
    pub fn bytes(&self) -> Option<u64> {
        Some(self.free_bytes?.saturating_sub(self.own_bytes).saturating_sub(self.others_bytes))
    }

    fn of(limits: Vec<Limit>, own_bytes: u64, others: &[Entry]) -> Self {
        let rooms = limits.into_iter().map(|limit| {
            let others = || {
                others.iter().filter(|other| {
                    other.memory_bytes > 0
                        && limit.group.is_none_or(|group| other.groups.contains(&group))
                })
            };
            Self {
                free_bytes: Some(limit.left),
                own_bytes,
                others_bytes: others().fold(0, |sum, other| other.memory_bytes.saturating_add(sum)),
                others: others().map(|other| other.pid).collect(),
            }
        });
        rooms.min_by_key(Self::bytes).unwrap_or_default()
    }
}

/// Bytes that a process has claimed and not taken.
#[derive(Clone, Copy, Default)]
struct Counts {
    /// Announced, and in no buffer yet.
    announced: u64,
    /// Of buffers that are being faulted in.
    taking: u64,
}

impl Counts {
    fn sum(self) -> u64 {
        self.announced + self.taking
    }
}

/// The claims of one process.
struct Claims {
    /// Of the process: a forked child has claims of its own.
    generation: u32,
    table: Option<Table>,
    entry: Entry,
    counts: Counts,
    num_announcements: usize,
    has_warned_of_cpus: bool,
}

static CLAIMS: Mutex<Option<Claims>> = Mutex::new(None);

/// Calls `act` with the claims of this process. Inside the gate: no child is forked with the lock.
fn with_claims<R>(act: impl FnOnce(&mut Claims) -> R) -> R {
    // Where it fails, pools do too, and say why.
    let _ = fork::register();
    let _entered = fork::enter();
    let mut claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
    if claims.as_ref().is_some_and(|claims| claims.generation != fork::generation()) {
        // Before the new one is opened: a lock ends where the process closes its file.
        *claims = None;
    }
    let claims = claims.get_or_insert_with(Claims::new);
    claims.follow_table();
    act(claims)
}

/// The table with this entry; where there is none, the log says why.
fn open_table(entry: &Entry) -> Option<Table> {
    let folder = std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty());
    let folder = PathBuf::from(folder.unwrap_or_else(|| FOLDER.into()));
    match Table::open(&folder, entry) {
        Ok(table) => Some(table),
        Err(error) => {
            let has_others = environment::rank_share().is_ok_and(|share| share.is_some())
                || std::env::var_os(FOLDER_VARIABLE).is_some();
            log::log!(
                target: "stepwell",
                if has_others { log::Level::Warn } else { log::Level::Info },
                "the ranks of this host do not see what memory and CPUs the others have claimed, \
                 since `{}` cannot be used: {error}\nhint: {FOLDER_VARIABLE}, a folder that all \
                 of them can write",
                folder.display()
            );
            None
        }
    }
}

impl Claims {
    fn new() -> Self {
        let entry = Entry {
            pid: process::id(),
            parent: std::os::unix::process::parent_id(),
            groups: free_memory::groups(),
            ..Entry::default()
        };
        let table = open_table(&entry);
        Self {
            generation: fork::generation(),
            table,
            entry,
            counts: Counts::default(),
            num_announcements: 0,
            has_warned_of_cpus: false,
        }
    }

    /// Where the table was removed (a service that cleans up at the end of a session, say),
    /// processes that come later have another one: this one goes there with what it has claimed.
    fn follow_table(&mut self) {
        if self.table.as_ref().is_some_and(Table::is_removed) {
            self.entry.memory_bytes = self.counts.sum();
            self.table = open_table(&self.entry);
        }
    }

    fn others(&self) -> Vec<Entry> {
        self.table.as_ref().and_then(|table| table.others().ok()).unwrap_or_default()
    }

    fn room_beside(&self, own_bytes: u64) -> Room {
        // Read before the claims: a page that is faulted in meanwhile does not count twice.
        let limits = free_memory::limits();
        Room::of(limits, own_bytes, &self.others())
    }

    /// Where it fails, which a file in memory does not once it is there, others see the last claim.
    fn tell(&self) {
        if let Some(table) = &self.table {
            let _ = table.write_memory(self.counts.sum());
        }
    }

    /// Claims memory by a change of the counts. It is undone, and the result is false, where the
    /// room beside it is refused.
    fn claim(
        &mut self,
        change: impl FnOnce(&mut Counts),
        is_refused: impl FnOnce(&Room) -> bool,
    ) -> (bool, Room) {
        let before = self.counts;
        let _turn = self.table.as_ref().map(Table::turn);
        // Seen before it is weighed: see `Table::turn`.
        change(&mut self.counts);
        self.tell();
        let room = self.room_beside(before.sum());
        let is_refused = is_refused(&room);
        if is_refused {
            self.counts = before;
            self.tell();
        }
        (!is_refused, room)
    }
}

/// What this process can still take.
pub fn room() -> Room {
    with_claims(|claims| claims.room_beside(claims.counts.sum()))
}

/// Memory that was announced. The claim of what no buffer has taken ends with it, or with the last
/// of several that overlap.
#[derive(Debug)]
pub struct Announcement {
    generation: u32,
}

/// Claims `nbytes` for buffers that come, and says what room there was.
///
/// Nothing is claimed, and the announcement is `None`, where `is_checked` and they are more than
/// the room and `held_bytes`, which are taken already and given back meanwhile.
pub fn announce(nbytes: u64, held_bytes: u64, is_checked: bool) -> (Option<Announcement>, Room) {
    with_claims(|claims| {
        let more = nbytes.saturating_sub(held_bytes);
        let (is_claimed, room) = claims.claim(
            |counts| counts.announced = counts.announced.saturating_add(more),
            |room| is_checked && room.bytes().is_some_and(|bytes| more > bytes),
        );
        claims.num_announcements += usize::from(is_claimed);
        (is_claimed.then(|| Announcement { generation: fork::generation() }), room)
    })
}

impl Drop for Announcement {
    fn drop(&mut self) {
        with_claims(|claims| {
            if claims.generation == self.generation {
                claims.num_announcements -= 1;
                if claims.num_announcements == 0 {
                    claims.counts.announced = 0;
                    claims.tell();
                }
            }
        });
    }
}

/// A buffer that is being faulted in.
#[derive(Debug)]
pub(super) struct Taking {
    generation: u32,
    left: AtomicU64,
}

/// Claims what a buffer takes beyond what was announced.
///
/// # Errors
/// [`Error::Os`] where that is more than the room.
pub(super) fn take(nbytes: u64) -> Result<Taking> {
    with_claims(|claims| {
        let announced = nbytes.min(claims.counts.announced);
        let (is_claimed, room) = claims.claim(
            |counts| {
                counts.announced -= announced;
                counts.taking += nbytes;
            },
            |room| is_beyond(room, nbytes, announced),
        );
        if !is_claimed {
            return Err(refusal(nbytes, &room));
        }
        Ok(Taking { generation: fork::generation(), left: AtomicU64::new(nbytes) })
    })
}

/// What was announced has been weighed, and has only to be there.
fn is_beyond(room: &Room, nbytes: u64, announced: u64) -> bool {
    room.free_bytes.is_some_and(|free| nbytes > free)
        || room.bytes().is_some_and(|bytes| nbytes - announced > bytes)
}

fn refusal(nbytes: u64, room: &Room) -> Error {
    let claimed = match room.others_bytes {
        0 => String::new(),
        claimed => {
            format!(", of which processes `{:?}` have claimed `{claimed}`", room.others)
        }
    };
    Error::os(
        format!(
            "cannot take `{nbytes}` bytes of host memory, `{}` are free{claimed}; hint: moments of \
             `q8` or `bf16` take less than fp32; see `free -h` and the container's limit",
            room.free_bytes.unwrap_or(0),
        ),
        Errno::NOMEM,
    )
}

impl Taking {
    /// So much more of it is faulted in. May be called from a task.
    pub(super) fn touched(&self, nbytes: u64) {
        with_claims(|claims| {
            let left = self.left.load(Ordering::Relaxed);
            let nbytes = nbytes.min(left);
            self.left.store(left - nbytes, Ordering::Relaxed);
            if claims.generation == self.generation {
                claims.counts.taking -= nbytes;
                claims.tell();
            }
        });
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        self.touched(u64::MAX);
    }
}

/// Tells other processes that this one steps on `cpus`, and warns, once in this process, where
/// another one does so too.
pub(super) fn claim_cpus(cpus: &[usize]) {
    with_claims(|claims| {
        let all: BTreeSet<usize> = claims.entry.cpus.iter().chain(cpus).copied().collect();
        claims.entry.cpus = all.into_iter().collect();
        claims.entry.memory_bytes = claims.counts.sum();
        let Some(table) = &claims.table else { return };
        let _turn = table.turn();
        let _ = table.write(&claims.entry);
        if claims.has_warned_of_cpus {
            return;
        }
        if let Some(warning) = warning_of_cpus(cpus, &claims.entry, &claims.others()) {
            claims.has_warned_of_cpus = true;
            log::warn!(target: "stepwell", "{warning}");
        }
    });
}

fn warning_of_cpus(cpus: &[usize], own: &Entry, others: &[Entry]) -> Option<String> {
    // A process and one that it has started are not two ranks.
    let others = others.iter().filter(|other| other.pid != own.parent && other.parent != own.pid);
    let mut shared = BTreeSet::new();
    let mut processes = Vec::new();
    for other in others {
        let before = shared.len();
        shared.extend(cpus.iter().filter(|cpu| other.cpus.contains(cpu)));
        if shared.len() > before {
            processes.push(other.pid);
        }
    }
    (!processes.is_empty()).then(|| {
        format!(
            "steps of this process run on the CPUs `{}`, on which those of the processes \
             `{processes:?}` run too, and each waits for the other\nhint: ranks of one job take \
             their share of the cores where a launcher sets LOCAL_RANK and LOCAL_WORLD_SIZE, as \
             torchrun does; for several jobs on one host, `taskset -c` gives each its own",
            format_cpu_list(&shared.into_iter().collect::<Vec<_>>())
        )
    })
}

/// Other processes that step on some of `cpus`, by number.
pub fn others_on(cpus: &[usize]) -> Vec<u32> {
    with_claims(|claims| {
        let others = claims.others().into_iter();
        let is_there = |other: &Entry| other.cpus.iter().any(|cpu| cpus.contains(cpu));
        others.filter(is_there).map(|other| other.pid).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other(pid: u32, memory_bytes: u64, groups: &[u64]) -> Entry {
        Entry { pid, memory_bytes, groups: groups.to_vec(), ..Entry::default() }
    }

    #[test]
    fn what_others_have_claimed_is_not_free_where_they_share_the_limit() {
        let limits = |host, job| {
            vec![Limit { left: host, group: None }, Limit { left: job, group: Some(7) }]
        };
        let others = [other(1, 30, &[9]), other(2, 20, &[8, 7]), other(3, 0, &[7])];
        let room = Room::of(limits(100, 90), 0, &others);
        assert_eq!((room.bytes(), room.others), (Some(50), vec![1, 2]), "the host leaves less");
        let room = Room::of(limits(100, 60), 5, &others);
        assert_eq!((room.bytes(), room.free_bytes), (Some(35), Some(60)), "the group does");
        assert_eq!(room.others, [2]);
        assert_eq!(Room::of(limits(10, 90), 0, &others).bytes(), Some(0));
        assert_eq!(Room::of(vec![], 3, &others).bytes(), None);
    }

    #[test]
    fn what_was_announced_has_only_to_be_there() {
        let room = |free, own, others| Room {
            free_bytes: Some(free),
            own_bytes: own,
            others_bytes: others,
            others: vec![],
        };
        // Others have claimed the rest meanwhile.
        assert!(!is_beyond(&room(100, 60, 40), 60, 60));
        assert!(is_beyond(&room(59, 60, 40), 60, 60));
        assert!(is_beyond(&room(100, 60, 40), 61, 60));
        assert!(!is_beyond(&room(100, 60, 39), 61, 60));
        assert!(is_beyond(&room(100, 0, 41), 60, 0));
    }

    #[test]
    fn a_refusal_names_what_others_have_claimed() {
        let room =
            Room { free_bytes: Some(4095), own_bytes: 0, others_bytes: 95, others: vec![12, 13] };
        let error = refusal(4096, &room).to_string();
        for part in ["`4096`", "`4095` are free", "`[12, 13]` have claimed `95`", "hint: "] {
            assert!(error.contains(part), "{error}");
        }
        let error = refusal(4096, &Room { others_bytes: 0, ..room }).to_string();
        assert!(!error.contains("claimed"), "{error}");
    }

    #[test]
    fn shared_cpus_are_named_but_for_those_of_a_child() {
        let on = |pid, parent, cpus: &[usize]| Entry {
            pid,
            parent,
            cpus: cpus.to_vec(),
            ..Entry::default()
        };
        let own = on(10, 9, &[0, 1, 2, 3]);
        let warning = |others: &[Entry]| warning_of_cpus(&own.cpus, &own, others);
        assert_eq!(warning(&[on(11, 1, &[4]), on(9, 1, &[0]), on(12, 10, &[1])]), None);
        let text = warning(&[on(11, 1, &[4]), on(20, 1, &[1, 2, 9]), on(21, 1, &[3])]);
        let text = text.expect("a warning");
        assert!(text.contains("`1-3`") && text.contains("`[20, 21]`"), "{text}");
        assert!(text.contains("LOCAL_RANK") && text.contains("taskset"), "{text}");
    }
}
