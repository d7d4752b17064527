//! Drives that fail, do a part, lie, or do not answer.

use super::*;

#[test]
fn a_write_that_fails_says_where_and_leaves_the_committed_step() {
    let place = Place::new(2);
    let drives = Drives::new();
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    drives.fault(1, Call::Write, 0, Effect::Fails(Errno::IO));
    let path = place.member(1);
    let where_it_was = ["record `3`", "volume `v`", "member `1`", "offset `", "step `2`"];
    let error = write(&volume, 3, 2).expect_err("on the drive that fails");
    assert_says(&error, &where_it_was);
    assert_says(&error, &[&path.display().to_string()]);
    assert_eq!(errno(&error), Some(Errno::IO));
    assert_says(&volume.commit(2).expect_err("void"), &["record `3`", "void"]);
    assert_says(&read(&volume, 3).expect_err("void"), &["record `3`", "void"]);
    volume.revert().expect("nothing in flight");
    assert_is_step(&volume, 1);
    drives.repair();
    write_all(&volume, 2).expect("written");
    volume.commit(2).expect("committed");
    drop(volume);
    assert_is_step(&place.open().expect("opened"), 2);
}

#[test]
fn a_read_that_fails_says_where() {
    let place = Place::new(2);
    let drives = Drives::new();
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    write_all(&volume, 7).expect("written");
    drives.fault(0, Call::Read, 0, Effect::Fails(Errno::IO));
    let error = read(&volume, 3).expect_err("on the drive that fails");
    assert_says(&error, &["read record `3`", "volume `v`", "member `0`", "offset `", "step `7`"]);
    drives.repair();
    assert_is_step(&volume, 7);
}

#[test]
fn short_calls_are_gone_on_from() {
    let place = Place::new(2);
    let drives = Drives::new();
    drives.fault(0, Call::Write, 0, Effect::Short(4096 + 512));
    drives.fault(1, Call::Read, 0, Effect::Short(4096));
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    assert_is_step(&volume, 1);
    drop(volume);
    assert_is_step(&place.open().expect("opened"), 1);
}

/// Reads that come back wrong, and writes that went wrong and said nothing.
#[test]
fn wrong_bytes_are_an_error() {
    for (call, effect) in [
        (Call::Read, Effect::Flips(8 * 100)),
        (Call::Write, Effect::Flips(8 * 100)),
        (Call::Write, Effect::Torn(4096)),
        (Call::Write, Effect::Torn(0)),
    ] {
        let place = Place::new(1);
        let drives = Drives::new();
        let options = Options { between: drives.between(), ..kept() };
        let volume = place.create(&SIZES, &options).expect("made");
        write_all(&volume, 1).expect("written");
        volume.commit(1).expect("committed");
        drives.fault(0, call, 0, effect);
        write(&volume, 8, 2).expect("it says");
        let error = read(&volume, 8).expect_err("other bytes");
        assert_says(&error, &["record `8`", "volume `v`", "member `0`", "offset `", "step `2`"]);
        assert_eq!(errno(&error), Some(Errno::BADMSG), "{error}");
    }
}

#[test]
fn what_is_cut_off_an_open_volume_is_an_error() {
    for engine in engines() {
        let place = Place::new(2);
        let volume = place.create(&SIZES, &Options { engine, ..kept() }).expect("made");
        write_all(&volume, 1).expect("written");
        volume.commit(1).expect("committed");
        let file = File::options().write(true).open(place.member(1)).expect("a member");
        // Into the slots: some records end within what is left, or have lost all of it.
        let nbytes = (128 << 10) + 4 * 4096 + 5 * 4096 + 512;
        file.set_len(nbytes).expect("cut");
        let found = volume.check(0..SIZES.len()).expect("an answer for each");
        assert!(!found.is_empty());
        for error in &found {
            assert_says(error, &["record `", "member `1`", "offset `", "step `1`"]);
        }
        assert!(found.iter().any(|error| error.to_string().contains("the file ends here")));
    }
}

#[test]
fn a_write_that_never_landed_is_a_stale_record() {
    let place = Place::new(1);
    let drives = Drives::new();
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    for step in 1..4 {
        if step == 3 {
            drives.fault(0, Call::Write, 0, Effect::Torn(0));
        }
        write(&volume, 5, step).expect("it says");
        drives.repair();
        volume.commit(step).expect("committed");
    }
    let error = read(&volume, 5).expect_err("that of step 1 is there");
    assert_says(&error, &["record `5`", "step `3`", "stale", "step `1`"]);
}

#[test]
fn a_full_drive_is_an_error_when_the_volume_is_made_and_nothing_is_left() {
    let place = Place::new(3);
    let drives = Drives::new();
    drives.fault(1, Call::Allocate, 0, Effect::Fails(Errno::NOSPC));
    let options = Options { between: drives.between(), ..kept() };
    let error = place.create(&SIZES, &options).expect_err("full");
    assert_says(&error, &["volume `v`", "member `1`", "bytes", "are free", "hint: "]);
    assert_eq!(errno(&error), Some(Errno::NOSPC));
    assert!(place.files().is_empty());
}

#[test]
fn after_a_flush_that_failed_nothing_is_done_any_more() {
    // The flush of records on a member without an index; write and flush of each copy of the index.
    for (member, call, after) in
        [(1, Call::Sync, 0), (0, Call::Write, 0), (0, Call::Sync, 1), (2, Call::Sync, 1)]
    {
        let place = Place::new(3);
        let drives = Drives::new();
        let options = Options { between: drives.between(), ..kept() };
        let volume = place.create(&SIZES, &options).expect("made");
        write_all(&volume, 1).expect("written");
        volume.commit(1).expect("committed");
        write_all(&volume, 2).expect("written");
        drives.fault(member, call, after, Effect::Fails(Errno::IO));
        let error = volume.commit(2).expect_err("on the drive that fails");
        let member = format!("member `{member}`");
        assert_says(&error, &["volume `v`", &member, "step `"]);
        drives.repair();
        for error in [
            volume.commit(2).expect_err("broken"),
            write(&volume, 0, 2).expect_err("broken"),
            read(&volume, 0).expect_err("broken"),
            volume.revert().expect_err("broken"),
        ] {
            assert_says(&error, &["not used any more", &member, "open it again"]);
        }
        drop(volume);
        let volume = place.open().expect("opened");
        assert_is_step(&volume, volume.step().expect("a committed step"));
    }
}

/// FLU-1: the system says so once, to a flush that nobody waits for while the step goes on.
#[test]
fn a_flush_that_fails_while_a_step_writes_fails_its_commit() {
    let place = Place::new(2);
    let drives = Drives::new();
    let options = Options { between: drives.between(), flush_bytes: 1, ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    drives.fault(1, Call::Sync, 0, Effect::Fails(Errno::IO));
    write_all(&volume, 2).expect("written");
    assert!(drives.has_failed_flush(SOON));
    drives.repair();
    let error = volume.commit(2).expect_err("what was written may be lost");
    assert_says(&error, &["sync", "volume `v`", "member `1`", "step `2`"]);
    assert_eq!(errno(&error), Some(Errno::IO));
    assert_says(&volume.commit(2).expect_err("broken"), &["not used any more", "open it again"]);
    drop(volume);
    assert_is_step(&place.open().expect("opened"), 1);
}

#[test]
fn a_drive_that_hangs_holds_nobody_up_for_ever() {
    // The flush of the records, and the write of the index.
    for call in [Call::Sync, Call::Write] {
        let place = Place::new(2);
        let drives = Drives::new();
        let io_timeout = Duration::from_millis(200);
        let options = Options { between: drives.between(), io_timeout, ..kept() };
        let volume = place.create(&SIZES, &options).expect("made");
        write_all(&volume, 1).expect("written");
        drives.fault(1, Call::Read, 0, Effect::Hangs);
        let mut ticket = volume.read(3, buffer(&volume)).expect("begun");
        assert!(ticket.wait(Duration::from_millis(1)).expect("no outcome").is_none());
        assert!(!ticket.is_over() && drives.hangs(SOON));
        assert_says(&begin_write(&volume, 3, 1).expect_err("being read"), &["record `3`"]);
        drives.fault(0, call, 0, Effect::Hangs);
        let error = volume.commit(1).expect_err("no answer");
        assert_eq!(errno(&error), Some(Errno::TIMEDOUT), "{error}");
        assert_says(&volume.commit(1).expect_err("broken"), &["not answered", "not used any more"]);
        let error = volume.close().expect_err("no answer");
        assert_eq!(errno(&error), Some(Errno::TIMEDOUT), "{error}");
        // The request and its buffer outlive the volume.
        drives.release();
        ticket.wait(SOON).expect("read after all").expect("over soon");
    }
}

/// REQ-1: the drive may still write to it.
#[test]
fn a_buffer_is_nobody_elses_until_its_read_has_ended() {
    let place = Place::new(1);
    let drives = Drives::new();
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    write_all(&volume, 1).expect("written");
    drives.fault(0, Call::Read, 0, Effect::Hangs);
    drop(volume.read(0, buffer(&volume)).expect("begun"));
    let free: Vec<RecordBuffer> = (0..3).map(|_| buffer(&volume)).collect();
    assert!(volume.buffer(Duration::from_millis(20)).is_none(), "that of the read");
    drives.release();
    buffer(&volume);
    drop(free);
}

/// Of a volume of two members at step 1, generation 2: the header's copies on each, and those of
/// the indices, copy 0 on the first member and copy 1 on the last.
const COPIES: [[(usize, u64); 2]; 4] = [
    [(0, 0), (0, 64 << 10)],
    [(1, 0), (1, 64 << 10)],
    [(0, 128 << 10), (1, (128 << 10) + 4096)],
    [(0, (128 << 10) + 2 * 4096), (1, (128 << 10) + 3 * 4096)],
];

#[test]
fn a_copy_that_cannot_be_read_takes_nothing_from_the_other() {
    for pair in COPIES {
        for lost in [&pair[..1], &pair[1..], &pair] {
            let place = Place::new(2);
            left_at_step_1(&place);
            let drives = Drives::new();
            lost.iter().for_each(|&(member, offset)| drives.lose_block(member, offset));
            let options = Options { between: drives.between(), ..kept() };
            let opened = Volume::open(&place.location, &options, &pool());
            if lost.len() == 2 {
                let error = opened.expect_err("both are lost");
                assert_says(&error, &["cannot read the", "volume `v`", "member `"]);
                assert_eq!(errno(&error), Some(Errno::IO), "{error}");
                continue;
            }
            let volume = opened.expect("the other copy");
            assert_is_step(&volume, 1);
            write_all(&volume, 2).expect("written");
            volume.commit(2).expect("committed");
            drop(volume);
            let volume = Volume::open(&place.location, &options, &pool()).expect("again");
            assert_is_step(&volume, 2);
        }
    }
}
