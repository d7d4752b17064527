//! What processes of a host tell each other of memory and CPUs: claims in forked children, which
//! are seen here, and end with them. One process, since a lock belongs to one.

mod forked;

use std::{
    env, fs,
    sync::{Mutex, MutexGuard, PoisonError},
};

use forked::in_forked_child;
use stepwell::host::{
    claims::{self, FOLDER_VARIABLE, Room, announce},
    memory::{Buffer, BufferConfig},
    pool::{Pool, PoolConfig},
};

const MIB: u64 = 1 << 20;

/// Each test in a child of its own, with a table of its own.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A body in a process with an empty table.
fn on_a_host(body: impl FnOnce()) {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    in_forked_child(|| {
        // SAFETY: the child has this one thread.
        unsafe { env::set_var(FOLDER_VARIABLE, folder.path()) };
        body();
        true
    });
}

/// What others have claimed, in MiB, and how many they are.
fn others() -> (u64, usize) {
    let room = claims::room();
    (room.others_bytes / MIB, room.others.len())
}

fn free(room: &Room) -> u64 {
    room.free_bytes.expect("Linux says")
}

#[test]
fn what_others_have_announced_is_not_free_until_they_end() {
    on_a_host(|| {
        let (mine, room) = announce(64 * MIB, 0, true);
        assert!(mine.is_some() && room.others_bytes == 0);
        in_forked_child(|| {
            // Of this process, and not of the one that it was forked from.
            assert_eq!(others(), (64, 1));
            let half = free(&claims::room()) / 2;
            let (first, _) = announce(half, 0, true);
            let own = claims::room();
            assert_eq!((own.own_bytes, own.others_bytes), (half, 64 * MIB));
            in_forked_child(|| {
                assert_eq!(others(), (64 + half / MIB, 2));
                // Of what is left nothing is lost, and of the rest nothing is had.
                let room = claims::room().bytes().expect("Linux says");
                let (fits, _) = announce(room / 2, 0, true);
                let (more, seen) = announce(room, 0, true);
                assert!(fits.is_some() && more.is_none());
                assert_eq!((seen.own_bytes, claims::room().own_bytes), (room / 2, room / 2));
                // What is held already is taken from it, and so it is where nothing is checked.
                assert!(announce(room, room, true).0.is_some());
                assert!(announce(room * 2, 0, false).0.is_some());
                true
            });
            // Its claims have ended with it.
            assert_eq!(others(), (64, 1));
            drop(first);
            assert_eq!(claims::room().own_bytes, 0);
            true
        });
        drop(mine);
        assert_eq!(claims::room().own_bytes, 0);
    });
}

#[test]
fn claims_go_to_the_table_that_is_there_after_one_was_removed() {
    on_a_host(|| {
        let (mine, _) = announce(64 * MIB, 0, true);
        let folder = env::var_os(FOLDER_VARIABLE).expect("set");
        for table in fs::read_dir(folder).expect("a folder") {
            fs::remove_file(table.expect("an entry").path()).expect("removed");
        }
        assert_eq!(claims::room().own_bytes, 64 * MIB);
        in_forked_child(|| {
            assert_eq!(others(), (64, 1));
            true
        });
        drop(mine);
        in_forked_child(|| {
            assert_eq!(others(), (0, 0));
            true
        });
    });
}

#[test]
fn an_entry_that_was_cut_short_hides_no_other() {
    on_a_host(|| {
        let (_mine, _) = announce(64 * MIB, 0, true);
        in_forked_child(|| {
            let (_claim, _) = announce(32 * MIB, 0, true);
            let folder = env::var_os(FOLDER_VARIABLE).expect("set");
            let table = fs::read_dir(folder).expect("a folder").next().expect("one");
            let path = table.expect("an entry").path();
            in_forked_child(|| {
                assert_eq!(others(), (96, 2));
                let file = fs::File::options().write(true).open(&path).expect("the table");
                // Behind the place without an entry, those of three processes.
                let entry_nbytes = file.metadata().expect("its size").len() / 4;
                file.set_len(3 * entry_nbytes - 1).expect("cut");
                assert_eq!(others(), (64, 1));
                true
            });
            true
        });
    });
}

#[test]
fn a_killed_process_leaves_nothing_though_its_child_lives() {
    on_a_host(|| {
        let (mut ends, mut said) = ([0; 2], [0; 2]);
        // SAFETY: two arrays of two descriptors.
        unsafe {
            assert!(libc::pipe(ends.as_mut_ptr()) == 0 && libc::pipe(said.as_mut_ptr()) == 0)
        };
        // SAFETY: this process has one thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let claim = announce(64 * MIB, 0, true);
            // SAFETY: as above. The orphan has the open table, too, until this test ends it.
            if unsafe { libc::fork() } == 0 {
                let mut byte = [0_u8];
                // SAFETY: bytes of this frame, to and from open pipes. The read returns once no
                // process has the other end.
                unsafe {
                    libc::close(ends[1]);
                    libc::write(said[1], byte.as_ptr().cast(), 1);
                    libc::read(ends[0], byte.as_mut_ptr().cast(), 1);
                    libc::_exit(i32::from(claim.0.is_none()));
                }
            }
            // SAFETY: waits for the signal below.
            unsafe { libc::pause() };
        }
        let mut byte = [0_u8];
        // SAFETY: a byte of this frame, from an open pipe.
        assert_eq!(unsafe { libc::read(said[0], byte.as_mut_ptr().cast(), 1) }, 1);
        assert_eq!(others(), (64, 1));
        // SAFETY: the child made above.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
        }
        assert_eq!(others(), (0, 0));
    });
}

#[test]
fn a_buffer_takes_what_was_announced_and_claims_no_more_once_it_is_there() {
    on_a_host(|| {
        let config = PoolConfig { threads: Some(2), ..PoolConfig::default() };
        let pool = Pool::new(&config).expect("pool");
        let buffer = |nbytes: u64| Buffer::new(nbytes as usize, &BufferConfig::default(), &pool);
        let own = || claims::room().own_bytes / MIB;
        let (claim, _) = announce(24 * MIB, 0, true);
        let first = buffer(16 * MIB).expect("buffer");
        assert_eq!(own(), 8, "what was faulted in is not claimed as well");
        let second = buffer(16 * MIB).expect("more than was announced");
        assert_eq!(own(), 0);
        drop((first, second, claim));
        // More than there is, so that nothing is taken below.
        let (_claim, _) = announce(4 * free(&claims::room()), 0, false);
        in_forked_child(|| {
            let error = buffer(16 * MIB).expect_err("claimed by another process").to_string();
            let others = claims::room().others;
            assert!(error.contains(&format!("`{others:?}` have claimed")), "{error}");
            assert_eq!(claims::room().own_bytes, 0);
            true
        });
    });
}

#[test]
fn where_the_folder_cannot_be_used_what_is_free_is_all_that_is_known() {
    on_a_host(|| {
        // SAFETY: this process has one thread.
        unsafe { env::set_var(FOLDER_VARIABLE, "/nowhere") };
        let room = claims::room();
        assert_eq!((room.others_bytes, room.bytes()), (0, room.free_bytes));
        let (claim, _) = announce(MIB, 0, true);
        assert!(claim.is_some() && claims::room().own_bytes == MIB);
        assert!(announce(free(&room) * 2, 0, true).0.is_none());
    });
}

#[test]
fn processes_on_the_same_cpus_are_seen() {
    on_a_host(|| {
        let pool = Pool::new(&PoolConfig::default()).expect("pool");
        pool.claim_cpus();
        assert_eq!(claims::others_on(pool.cpus()), [0_u32; 0]);
        let parent = std::process::id();
        in_forked_child(|| {
            let beyond = pool.cpus().iter().max().expect("a CPU") + 1;
            claims::others_on(pool.cpus()) == [parent] && claims::others_on(&[beyond]).is_empty()
        });
    });
}

#[test]
fn the_table_is_one_file_that_no_one_else_can_read() {
    on_a_host(|| {
        let (_claim, _) = announce(MIB, 0, true);
        let folder = env::var_os(FOLDER_VARIABLE).expect("set");
        let files: Vec<_> = fs::read_dir(folder).expect("a folder").flatten().collect();
        assert_eq!(files.len(), 1);
        use std::os::unix::fs::PermissionsExt;
        let mode = files[0].metadata().expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    });
}
