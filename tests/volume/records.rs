//! What holds without faults.

use super::*;

#[test]
fn what_was_written_is_read_by_every_engine_and_after_reopening_by_the_other() {
    let [ring, positional] = engines();
    for (engine, other) in [(ring, positional), (positional, ring)] {
        for num_members in [1, 2, 5] {
            let place = Place::new(num_members);
            let volume = place.create(&SIZES, &Options { engine, ..kept() }).expect("made");
            assert_eq!(volume.has_rings(), engine == EngineKind::IoUring);
            assert_eq!((volume.num_records(), volume.step()), (SIZES.len(), None));
            for step in 1..4 {
                write_all(&volume, step).expect("written");
                assert_is_step(&volume, step);
                volume.commit(step).expect("committed");
                assert_eq!(volume.step(), Some(step));
                assert_is_step(&volume, step);
            }
            let (read, written) = volume.bytes_moved();
            assert!(read == 2 * written && written > 3 * SIZES.iter().sum::<usize>() as u64);
            volume.close().expect("closed");

            let options = Options { engine: other, ..kept() };
            let volume = Volume::open(&place.location, &options, &pool()).expect("opened");
            assert_eq!(volume.step(), Some(3));
            assert_is_step(&volume, 3);
            write_all(&volume, 9).expect("written");
            volume.commit(9).expect("committed");
            assert_is_step(&volume, 9);
        }
    }
}

/// Workers of a step share one volume: each writes and reads records of its own.
#[test]
fn threads_share_a_volume() {
    const THREADS: usize = 4;
    for engine in engines() {
        let place = Place::in_memory(3);
        let volume = place.create(&[9000; 4 * THREADS], &Options { engine, ..kept() });
        let volume = volume.expect("made");
        for step in 1..20 {
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let volume = &volume;
                    scope.spawn(move || {
                        for record in (thread..volume.num_records()).step_by(THREADS) {
                            if step > 1 {
                                let found = read(volume, record).expect("whole");
                                assert!(found == content(record, step - 1, 9000));
                            }
                            write(volume, record, step).expect("written");
                        }
                    });
                }
            });
            volume.commit(step).expect("committed");
        }
        assert_is_step(&volume, 19);
    }
}

#[test]
fn weights_decide_what_a_member_holds() {
    let place = Place::new(3);
    let shape =
        Shape { weights: vec![400, 400, 200], stripe_bytes: 4096, ..Shape::new(vec![40_000; 50]) };
    let volume = Volume::create(&place.location, &shape, &kept(), &pool()).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    assert_is_step(&volume, 1);
    let sizes: Vec<u64> =
        volume.paths().iter().map(|path| fs::metadata(path).expect("a file").len()).collect();
    assert_eq!(sizes[0], sizes[1]);
    // Headers and indices beside the records: 128 KiB and 4 blocks.
    let records = |size: u64| size - (128 << 10) - 4 * 4096;
    assert_eq!(records(sizes[0]), 2 * records(sizes[2]));
}

#[test]
fn a_step_that_was_not_committed_is_gone_after_reopening_and_after_a_revert() {
    let place = Place::new(2);
    let volume = place.create(&SIZES, &kept()).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    write_all(&volume, 2).expect("written");
    assert_is_step(&volume, 2);
    volume.revert().expect("nothing in flight");
    assert_is_step(&volume, 1);
    // A part of the records only: the others stay as they are.
    write(&volume, 3, 2).expect("written");
    volume.commit(2).expect("committed");
    write(&volume, 4, 3).expect("written");
    volume.close().expect("closed");
    let volume = place.open().expect("opened");
    assert_eq!(volume.step(), Some(2));
    for (record, nbytes) in SIZES.into_iter().enumerate() {
        let step = if record == 3 { 2 } else { 1 };
        let found = read(&volume, record).expect("whole");
        assert!(found == content(record, step, nbytes), "record {record}");
    }
}

/// Step 2 after step 1, of all records but one.
fn left_at_step_2(place: &Place) {
    left_at_step_1(place);
    let volume = place.open().expect("opened");
    (0..SIZES.len()).filter(|&record| record != 5).for_each(|record| {
        write(&volume, record, 2).expect("written");
    });
    volume.commit(2).expect("committed");
}

/// CMT-5.
#[test]
fn a_volume_goes_back_by_one_step_and_no_further() {
    let place = Place::new(3);
    let at = |step| {
        let options = Options { step: Some(step), ..kept() };
        Volume::open(&place.location, &options, &pool())
    };
    left_at_step_2(&place);
    assert_says(&at(3).expect_err("never"), &["step `3`", "`2`", "`1`"]);
    assert_eq!(at(2).expect("the last").step(), Some(2));
    for _ in 0..2 {
        let volume = at(1).expect("the one before");
        assert_eq!(volume.step(), Some(1));
        assert_is_step(&volume, 1);
    }
    let volume = place.open().expect("opened");
    assert_is_step(&volume, 1);
    // The way to go is another one now; the first one is not forgotten before its commit.
    assert_eq!(volume.step(), Some(1));
    write_all(&volume, 2).expect("written");
    volume.commit(2).expect("committed");
    write_all(&volume, 3).expect("written");
    volume.commit(3).expect("committed");
    drop(volume);
    assert_says(&at(1).expect_err("it is gone"), &["step `1`", "`3`", "`2`"]);
    let volume = at(2).expect("the one before");
    assert_is_step(&volume, 2);
    write_all(&volume, 3).expect("written");
    volume.commit(3).expect("committed");
    assert_is_step(&volume, 3);
}

#[test]
fn what_a_step_has_begun_to_write_is_not_read_as_the_step_before() {
    let place = Place::new(2);
    left_at_step_2(&place);
    let volume = place.open().expect("opened");
    write(&volume, 3, 3).expect("written");
    drop(volume);
    let options = Options { step: Some(1), ..kept() };
    let volume = Volume::open(&place.location, &options, &pool()).expect("opened");
    assert_says(&read(&volume, 3).expect_err("of step 3"), &["record `3`", "member `"]);
    assert!(read(&volume, 4).expect("whole") == content(4, 1, SIZES[4]));
}

#[test]
fn files_are_removed_unless_they_are_kept() {
    let place = Place::new(2);
    let options = Options { keep: false, ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    assert_eq!(place.files(), ["v.0.stepwell", "v.1.stepwell"]);
    volume.close().expect("closed");
    assert!(place.files().is_empty());
    drop(place.create(&SIZES, &options).expect("the name is free again"));
    assert!(place.files().is_empty());
    left_at_step_1(&place);
    assert_eq!(place.files().len(), 2);
    drop(Volume::open(&place.location, &options, &pool()).expect("opened"));
    assert!(place.files().is_empty());
}

#[test]
fn without_durability_there_is_one_slot_and_nothing_is_left() {
    for engine in engines() {
        let place = Place::new(2);
        let shape = Shape { durability: Durability::None, ..Shape::new(SIZES.to_vec()) };
        let options = Options { engine, keep: false, ..kept() };
        let volume = Volume::create(&place.location, &shape, &options, &pool()).expect("made");
        assert!(place.files().is_empty(), "they have no names");
        for step in 1..4 {
            write_all(&volume, step).expect("written");
            volume.commit(step).expect("committed");
            assert_is_step(&volume, step);
        }
        let error = volume.revert().expect_err("in place");
        assert_says(&error, &["in place"]);
        let kept = Volume::create(&place.location, &shape, &kept(), &pool());
        assert_says(&kept.expect_err("nothing to keep"), &["keep", "durability"]);
    }
}

#[test]
fn misuse_is_refused_and_named() {
    let place = Place::new(2);
    let volume = place.create(&[100, 200], &kept()).expect("made");
    let unwritten = volume.read(1, buffer(&volume)).expect_err("never written");
    assert_says(&unwritten, &["record `1`", "volume `v`", "never written"]);
    let missing = volume.read(2, buffer(&volume)).expect_err("no such record");
    assert_says(&missing, &["record is `2`", "`2` of volume"]);
    let other = Place::new(1);
    let other = other.create(&[100], &kept()).expect("made");
    let foreign = volume.write(0, 1, buffer(&other)).expect_err("a buffer of another volume");
    assert_says(&foreign, &["another volume"]);
    write(&volume, 0, 1).expect("written");
    assert_says(&volume.commit(0).expect_err("of a later step"), &["record `0`", "step `1`"]);
    let mut ticket = begin_write(&volume, 0, 1).expect("begun");
    ticket.wait(SOON).expect("written").expect("over soon");
    assert_says(&ticket.wait(SOON).expect_err("given"), &["again"]);
    volume.commit(1).expect("committed");
    // All buffers are with a caller.
    let taken: Vec<RecordBuffer> = (0..4).map(|_| buffer(&volume)).collect();
    assert!(volume.buffer(Duration::ZERO).is_none());
    drop(taken);
    buffer(&volume);

    let refused = |location: &Location, shape: &Shape| {
        Volume::create(location, shape, &kept(), &pool()).expect_err("refused")
    };
    let shape = Shape::new(vec![100]);
    for name in ["", ".v", "a/b", "a b"] {
        let location = Location { name: name.to_owned(), ..place.location.clone() };
        assert_says(&refused(&location, &shape), &[&format!("is `{name}`")]);
    }
    let fresh = Location { name: unique_name().expect("a name"), ..place.location.clone() };
    let twice = Location { drives: vec![fresh.drives[0].clone(); 2], ..fresh.clone() };
    assert_says(&refused(&twice, &shape), &["member `1`", "another member's"]);
    let weights = Shape { weights: vec![1], ..shape.clone() };
    assert_says(&refused(&fresh, &weights), &["`1` weights", "2 members"]);
    let stripe = Shape { stripe_bytes: 0, ..shape.clone() };
    assert_says(&refused(&fresh, &stripe), &["stripe_bytes is `0`"]);
    assert_says(&refused(&fresh, &Shape::new(vec![7, 0])), &["record `1` has `0` bytes"]);
    let missing = Location { drives: vec![place.root.path().join("none")], ..fresh };
    assert_says(&refused(&missing, &shape), &["member `0`", "none"]);
    assert_eq!(place.files(), ["v.0.stepwell", "v.1.stepwell"], "nothing is left of these");
}
