//! What has room in the memory of a selection, and what is refused.

use super::*;

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let selecting = selecting(&mut all, 2, 0.2);
    let engine = &selecting.engine;
    let selectable: Vec<Selectable> = engine.selectable().collect();
    let mut draw_of = Draw::new(9);
    let one = selectable.iter().find(|one| one.tensor == 1).expect("a matrix");
    let good = change_of(&mut draw_of, one);
    draw(&mut all, &mut expected, 1);
    let mut refused = |change: Change, has: &dyn Fn(usize) -> Option<bool>| {
        let error = submit(engine, &mut all, None, (1, hyper_of(1)), has, vec![change]);
        let text = error.expect_err("must be refused").to_string();
        on_device::discard(engine);
        text
    };
    let all_have = |_: usize| Some(false);
    let end = if good.by_columns { one.row_len } else { one.rows };
    let more = Change { indices: (0..end as u32).collect(), ..good.clone() };
    assert!(refused(more, &all_have).contains("room in the memory"));
    let none = Change { indices: Vec::new(), ..good.clone() };
    assert!(refused(none, &all_have).contains("are selected"));
    let mut twice = good.clone();
    twice.indices[1] = twice.indices[0];
    assert!(refused(twice, &all_have).contains("are selected"));
    let mut outside = good.clone();
    *outside.indices.last_mut().expect("one") = end as u32;
    assert!(refused(outside, &all_have).contains("are selected"));
    // It is one row, of which no columns are selected.
    let vector = selectable.iter().find(|one| one.tensor == 6).expect("a vector");
    let columns = Change { segment: vector.segment, by_columns: true, indices: vec![0] };
    assert!(refused(columns, &all_have).contains("are selected"));
    let nowhere = Change { segment: 1000, ..good.clone() };
    assert!(refused(nowhere, &all_have).contains("(1000, "));
    let without = |index: usize| (index != 1).then_some(false);
    assert!(refused(good.clone(), &without).contains("are selected"));
    submit(engine, &mut all, None, (1, hyper_of(1)), all_have, vec![good.clone()]).expect("a step");
    finish(engine);
    let group = engine.next_group(SOON).expect("a step that works").expect("it is over");
    // Its turn, and its tensor is stepped at once.
    let next = selectable.iter().find(|one| one.group == group).expect("two groups");
    let change = change_of(&mut draw_of, next);
    let at_once = |index: usize| Some(index == next.tensor);
    let error = submit(engine, &mut all, Some(2.0), (2, hyper_of(2)), at_once, vec![change]);
    assert!(error.expect_err("must be refused").to_string().contains("whose turn it is"));
    on_device::discard(engine);
    // The turn of another group.
    let other = selectable.iter().find(|one| one.group != group).expect("two groups");
    let change = change_of(&mut draw_of, other);
    let error = submit(engine, &mut all, Some(2.0), (2, hyper_of(2)), all_have, vec![change]);
    assert!(error.expect_err("must be refused").to_string().contains("whose turn it is"));
    // A step without the gradients of what is selected, though nothing is selected anew.
    let mut updates: Vec<Update> = all
        .iter_mut()
        .enumerate()
        .map(|(index, one)| {
            let update = one.update(index, 2, hyper_of(2));
            Update { tensor: without_grad(update.tensor), ..update }
        })
        .collect();
    let work = Work { grads: &[], changes: Vec::new() };
    // SAFETY: the tensors outlive the engine.
    let error = unsafe { engine.submit_with(Some(2.0), &updates, work, &mut None, STREAM) };
    assert!(error.expect_err("must be refused").to_string().contains("grads has `0` entries"));
    // A weight that the device could not write, of a tensor that had nothing selected before.
    let small = selectable.iter().find(|one| one.tensor == 2).expect("a matrix");
    updates[2].weight = None;
    let grads: Vec<u64> =
        all.iter().map(|one| one.grad.as_ptr().expose_provenance() as u64).collect();
    let work = Work { grads: &grads, changes: vec![change_of(&mut draw_of, small)] };
    // SAFETY: as above.
    let error = unsafe { engine.submit_with(None, &updates, work, &mut None, STREAM) };
    let message = error.expect_err("must be refused").to_string();
    assert!(message.contains("tensor `2` has its weight in host memory"), "{message}");
    expected.iter_mut().for_each(|one| one.step(widest(), 1, &hyper_of(1)));
    assert_stepped(&mut all, &mut expected, "refused");
    let numels = [10];
    let sizes = |fraction, row_lens: &[usize]| {
        selection_nbytes(&numels, &[Dtype::Float32], 1, row_lens, fraction)
    };
    let said =
        |fraction, row_lens: &[usize]| sizes(fraction, row_lens).expect_err("refused").to_string();
    assert!(said(1.5, &[5]).contains("fraction is `1.5`"));
    assert!(said(0.5, &[]).contains("row_lens has `0`"));
    assert_eq!(sizes(0.0, &[5]).expect("sizes"), (0, 0));
    assert_eq!(sizes(0.0, &[0]).expect("sizes"), (0, 0));
    // A vector is selected whole, in multiples of 64 bytes.
    assert_eq!(sizes(0.5, &[0]).expect("sizes"), (128, 128));
}
