//! Members that are not what they were; what is found on drives, and removed.

use super::*;

#[test]
fn a_member_that_is_not_what_it_was_is_named() {
    let opened = |change: &dyn Fn(&Place)| {
        let place = Place::new(3);
        left_at_step_1(&place);
        change(&place);
        place.open().map(|volume| assert_is_step(&volume, 1))
    };
    let refused = |change: &dyn Fn(&Place)| opened(change).expect_err("refused");
    let swap = |place: &Place| {
        let [first, second] = [place.member(1), place.member(2)];
        fs::rename(&first, place.root.path().join("x")).expect("moved");
        fs::rename(&second, &first).expect("moved");
        fs::rename(place.root.path().join("x"), &second).expect("moved");
    };
    let copy_of_another = |place: &Place| {
        let other = Place::new(3);
        left_at_step_1(&other);
        fs::copy(other.member(1), place.member(1)).expect("copied");
    };
    let resize = |nbytes: u64| {
        move |place: &Place| {
            let file = File::options().write(true).open(place.member(2)).expect("a file");
            file.set_len(nbytes).expect("resized");
        }
    };

    opened(&|_| {}).expect("nothing was changed");
    assert_says(
        &refused(&|place| fs::remove_file(place.member(1)).expect("removed")),
        &["volume `v`", "member `1`", "missing"],
    );
    assert_says(&refused(&swap), &["volume `v`", "member `1`", "is member `2`"]);
    assert_says(&refused(&copy_of_another), &["member `1`", "another volume"]);
    assert_says(&refused(&resize(200_000)), &["member `2`", "truncated", "`200000` bytes"]);
    assert_says(&refused(&resize(0)), &["member `2`", "the file ends here"]);
    let zeroed = |place: &Place| {
        let file = File::options().write(true).open(place.member(0)).expect("a file");
        file.write_all_at(&[0; 128 << 10], 0).expect("written");
    };
    assert_says(&refused(&zeroed), &["member `0`", "no member of a volume"]);
    // One of the copies of the header is enough, none is not.
    opened(&|place| flip(&place.member(1), 40)).expect("the other copy");
    opened(&|place| flip(&place.member(1), (64 << 10) + 40)).expect("the other copy");
    let both = |place: &Place| {
        flip(&place.member(1), 40);
        flip(&place.member(1), (64 << 10) + 40);
    };
    assert_says(&refused(&both), &["member `1`", "damaged header"]);
    // The same of the newest index: of generation 2, so at place 0; copy 1 is on the last member.
    let first_index = 128 << 10;
    opened(&|place| flip(&place.member(0), first_index + 70)).expect("the other copy");
    opened(&|place| flip(&place.member(2), first_index + 4096 + 70)).expect("the other copy");
    let both = |place: &Place| {
        flip(&place.member(0), first_index + 70);
        flip(&place.member(2), first_index + 4096 + 70);
    };
    let error = refused(&both);
    assert_says(&error, &["index", "volume `v`", "member `0`"]);
    assert_eq!(errno(&error), Some(Errno::BADMSG));
    // What is opened is whole again: either copy alone would do the next time.
    let twice = |place: &Place| {
        flip(&place.member(0), first_index + 70);
        drop(place.open().expect("the other copy"));
        flip(&place.member(2), first_index + 4096 + 70);
    };
    opened(&twice).expect("the first copy");
    // Fewer folders than members.
    let place = Place::new(3);
    left_at_step_1(&place);
    let fewer = Location { drives: place.location.drives[..2].to_vec(), ..place.location };
    let error = Volume::open(&fewer, &kept(), &pool()).expect_err("one is not named");
    assert_says(&error, &["3` members", "2 are given"]);
}

#[test]
fn a_member_of_an_earlier_time_is_stale() {
    let place = Place::new(2);
    left_at_step_1(&place);
    let old = fs::read(place.member(1)).expect("a member");
    let volume = place.open().expect("opened");
    for step in 2..4 {
        write_all(&volume, step).expect("written");
        volume.commit(step).expect("committed");
    }
    drop(volume);
    // All but its header, which is the same.
    fs::write(place.member(1), old).expect("a member");
    let volume = place.open().expect("the index is on both members");
    let errors: Vec<Error> =
        (0..SIZES.len()).filter_map(|record| read(&volume, record).err()).collect();
    assert!(!errors.is_empty());
    for error in &errors {
        assert_eq!(errno(error), Some(Errno::BADMSG), "{error}");
        assert_says(error, &["volume `v`", "member `1`", "offset `", "step `3`"]);
    }
}

#[test]
fn a_check_names_what_has_changed() {
    let place = Place::new(2);
    left_at_step_1(&place);
    let volume = place.open().expect("opened");
    assert!(volume.check(0..SIZES.len()).expect("read").is_empty());
    drop(volume);
    // The last bytes of a slot are the trailer of its member's last stripe.
    let path = place.member(1);
    let nbytes = fs::metadata(&path).expect("a file").len();
    let slot = (nbytes - (128 << 10) - 4 * 4096) / 2;
    flip(&path, nbytes - slot - 20);
    let volume = place.open().expect("opened");
    let found = volume.check(0..SIZES.len()).expect("read");
    assert_eq!(found.len(), 1);
    assert_says(&found[0], &["record `8`", "member `1`", "step `1`", "trailer is damaged"]);
    volume.check(0..10).expect_err("no such record");
    write(&volume, 8, 2).expect("written");
    volume.commit(2).expect("committed");
    assert!(volume.check(0..SIZES.len()).expect("read").is_empty());
}

#[test]
fn volumes_are_found_in_folders_and_removed_when_nobody_uses_them() {
    let place = Place::new(2);
    fs::write(place.location.drives[0].join("notes.txt"), "other").expect("written");
    fs::write(place.location.drives[0].join("w.3.stepwell"), "none of ours").expect("written");
    let volume = place.create(&SIZES, &kept()).expect("made");
    let list = || found::list(&place.location.drives[0]).expect("read");
    let files = list();
    let names: Vec<(&str, usize)> =
        files.iter().map(|file| (file.name.as_str(), file.member)).collect();
    assert_eq!(names, [("v", 0), ("w", 3)]);
    let contents = files[0].contents.as_ref().expect("a member");
    assert_eq!((contents.member, contents.num_members), (0, 2));
    assert_eq!(contents.num_records, SIZES.len() as u64);
    assert_eq!(files[0].nbytes, fs::metadata(place.member(0)).expect("a file").len());
    let holder = files[0].holder.as_ref().expect("this process");
    assert!(holder.contains(&format!("`{}`", std::process::id())), "{holder}");
    assert_eq!((&files[1].contents, &files[1].holder), (&None, &None));

    let remove = || found::remove(&place.location, SOON);
    assert_says(&remove().expect_err("used"), &["member `0`", "is used by", holder]);
    volume.close().expect("closed");
    assert_eq!(list()[0].holder, None);
    // Of a volume that has lost a member.
    fs::remove_file(place.member(1)).expect("removed");
    remove().expect("nobody uses it");
    assert_eq!(place.files(), ["notes.txt", "w.3.stepwell"]);
    assert_says(&remove().expect_err("gone"), &["volume `v`", "none of its members"]);
    found::list(&place.root.path().join("none")).expect_err("no such folder");
}

/// What a volume of three members is before its first commit.
fn left_without_a_step(place: &Place) {
    place.create(&SIZES, &kept()).expect("made").close().expect("closed");
}

fn zero(place: &Place, member: usize, nbytes: usize) {
    let file = File::options().write(true).open(place.member(member)).expect("a file");
    file.write_all_at(&vec![0; nbytes], 0).expect("written");
}

const HEADERS_BYTES: usize = 128 << 10;

/// As its maker leaves it that is killed: files, their space, indices, headers, in this order; or
/// who removes it, the last member first.
#[test]
fn what_is_left_of_a_volume_without_a_commit_makes_room() {
    let left: [&dyn Fn(&Place); 9] = [
        &|_| {},
        &|place| zero(place, 2, HEADERS_BYTES),
        &|place| (1..3).for_each(|member| zero(place, member, HEADERS_BYTES)),
        &|place| (0..3).for_each(|member| zero(place, member, HEADERS_BYTES)),
        &|place| (0..3).for_each(|member| zero(place, member, HEADERS_BYTES + 4 * 4096)),
        &|place| (0..3).for_each(|member| drop(File::create(place.member(member)).expect("cut"))),
        &|place| fs::remove_file(place.member(2)).expect("removed"),
        &|place| (1..3).for_each(|it| fs::remove_file(place.member(it)).expect("removed")),
        &|place| (0..3).for_each(|it| fs::remove_file(place.member(it)).expect("removed")),
    ];
    for change in left {
        let place = Place::new(3);
        left_without_a_step(&place);
        change(&place);
        assert_begins(&place);
    }
    // Not while its maker is alive.
    let place = Place::new(3);
    let _used = place.create(&SIZES, &kept()).expect("made");
    fs::remove_file(place.member(2)).expect("removed");
    let error = found::is_absent(&place.location, SOON).expect_err("it is used");
    assert_says(&error, &["member `0`", "is used by"]);
}

#[test]
fn a_volume_with_a_commit_makes_no_room_whatever_is_wrong_with_it() {
    let of_another = |place: &Place| {
        let other = Place::new(3);
        left_at_step_1(&other);
        (0..3).for_each(|it| fs::remove_file(place.member(it)).expect("removed"));
        left_without_a_step(place);
        fs::remove_file(place.member(2)).expect("removed");
        fs::copy(other.member(1), place.member(1)).expect("copied");
    };
    let changes: [&dyn Fn(&Place); 10] = [
        &|_| {},
        &|place| zero(place, 0, HEADERS_BYTES),
        &|place| zero(place, 0, HEADERS_BYTES + 4096),
        &|place| (0..3).for_each(|member| zero(place, member, HEADERS_BYTES)),
        &|place| fs::remove_file(place.member(0)).expect("removed"),
        &|place| fs::remove_file(place.member(2)).expect("removed"),
        &|place| (0..2).for_each(|it| fs::remove_file(place.member(it)).expect("removed")),
        &|place| drop(File::create(place.member(0)).expect("cut")),
        &|place| fs::write(place.member(0), "none of ours").expect("written"),
        &of_another,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let place = Place::new(3);
        left_at_step_1(&place);
        change(&place);
        let bytes = || -> Vec<Option<Vec<u8>>> {
            (0..3).map(|member| fs::read(place.member(member)).ok()).collect()
        };
        let before = bytes();
        assert!(!found::is_absent(&place.location, SOON).expect("read"), "change {number}");
        assert!(bytes() == before, "change {number}");
    }
    // Its drives in another order.
    let place = Place::new(2);
    left_at_step_1(&place);
    let drives = place.location.drives.iter().rev().cloned().collect();
    let location = Location { drives, ..place.location };
    assert!(!found::is_absent(&location, SOON).expect("read"));
}

#[test]
fn a_fifo_in_the_place_of_a_member_is_refused_and_not_waited_for() {
    let place = Place::new(2);
    left_at_step_1(&place);
    fs::remove_file(place.member(1)).expect("removed");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        place.member(1),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .expect("a fifo");
    let found = found::list(&place.location.drives[1]).expect("read");
    assert_eq!((found.len(), &found[0].contents), (1, &None));
    assert_says(&place.open().expect_err("a fifo"), &["member `1`", "no regular file"]);
    found::remove(&place.location, SOON).expect_err("a fifo");
    found::is_absent(&place.location, SOON).expect_err("a fifo");
}

/// Both copies of a member's header say something else at this offset, and are whole.
fn forge(place: &Place, member: usize, offset: usize, value: u64) {
    let file = File::options().read(true).write(true).open(place.member(member)).expect("a file");
    let mut header = vec![0; 4096];
    file.read_exact_at(&mut header, 0).expect("a header");
    header[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
    let sum = crc_fast::crc64_nvme(&header[..4088]);
    header[4088..].copy_from_slice(&sum.to_le_bytes());
    for copy in [0, 64 << 10] {
        file.write_all_at(&header, copy).expect("written");
    }
}

/// More than there is memory for: it would be another error.
#[test]
fn what_a_header_says_takes_no_memory_before_it_is_known_to_be_true() {
    const NUM_RECORDS: u64 = 1 << 31;
    const SLOT_BYTES: u64 = NUM_RECORDS * 4096;
    for has_room in [false, true] {
        let place = Place::in_memory(1);
        left_at_step_1(&place);
        forge(&place, 0, 48, NUM_RECORDS);
        if has_room {
            forge(&place, 0, 56, SLOT_BYTES);
        }
        let file = File::options().write(true).open(place.member(0)).expect("a file");
        // Holes.
        if let Err(error) = file.set_len((NUM_RECORDS * 32 + 4096) * 4 + 2 * SLOT_BYTES + (1 << 20))
        {
            eprintln!("skipped: no file has so many bytes here ({error})");
            return;
        }
        let error = place.open().expect_err("forged");
        assert_says(&error, &["volume `v`", if has_room { "the index" } else { "no room" }]);
        assert_eq!(errno(&error), Some(Errno::BADMSG), "{error}");
    }
}
