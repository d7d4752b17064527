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
    let sizes = |scope, row_lens: &[usize]| {
        selection_nbytes(&numels, &[Dtype::Float32], 1, row_lens, scope)
    };
    let said = |scope, row_lens: &[usize]| sizes(scope, row_lens).expect_err("refused").to_string();
    assert!(said(Scope::Tensor(1.5), &[5]).contains("fraction is `1.5`"));
    assert!(said(Scope::Tensor(0.5), &[]).contains("row_lens has `0`"));
    assert_eq!(sizes(Scope::Tensor(0.0), &[5]).expect("sizes"), (0, 0));
    assert_eq!(sizes(Scope::Tensor(0.0), &[0]).expect("sizes"), (0, 0));
    // A vector is selected whole, in multiples of 64 bytes.
    assert!(
        said(Scope::Global(127), &[0]).contains("budget_bytes is `127`, expected at least 128")
    );
    assert_eq!(sizes(Scope::Global(1000), &[0]).expect("sizes"), (128, 128));
    // No more than all channels take.
    assert_eq!(sizes(Scope::Global(1000), &[5]).expect("sizes"), (192, 192));
    assert_eq!(sizes(Scope::Global(100), &[5]).expect("sizes"), (64, 64));
}

/// Channels share one budget: what a step that is whole has given a segment is what it has.
#[test]
fn a_budget_is_shared_by_all_until_the_next_step_that_is_whole() {
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let selecting = selecting_in(&mut all, 1, Scope::Global(20_000));
    let engine = &selecting.engine;
    let selectable: Vec<Selectable> = engine.selectable().collect();
    let first = |tensor| selectable.iter().find(|one| one.tensor == tensor).expect("it");
    // 12 bytes for each of 77 elements, and 4 for the index.
    let rows = |tensor, count: usize| {
        let indices = (0..count as u32).collect();
        Change { segment: first(tensor).segment, by_columns: false, indices }
    };
    let mut step = |number: u64, deferred, changes: Vec<Change>| {
        draw(&mut all, &mut expected, number);
        let hyper = hyper_of(number);
        let done = submit(engine, &mut all, deferred, (number, hyper), |_| Some(false), changes);
        match &done {
            Ok(()) => expected.iter_mut().for_each(|one| one.step(widest(), number, &hyper)),
            Err(_) => on_device::discard(engine),
        }
        finish(engine);
        done.map_err(|error| error.to_string())
    };
    let full = "room in the memory";
    assert!(step(1, None, vec![rows(1, 22)]).expect_err("too many").contains(full));
    assert!(step(1, None, vec![rows(1, 20), rows(8, 1)]).is_ok());
    // Another has no memory, and as much of this one as was given to it.
    assert!(step(2, Some(1.0), vec![rows(2, 1)]).expect_err("no place").contains(full));
    assert!(step(2, Some(1.0), vec![rows(1, 21)]).expect_err("too many").contains(full));
    assert!(step(2, Some(1.0), vec![rows(1, 19)]).is_ok());
    assert!(step(3, Some(1.0), vec![rows(1, 20)]).is_ok());
    assert!(step(4, None, vec![rows(2, 39)]).is_ok());
    assert!(step(5, Some(1.0), vec![rows(1, 1)]).expect_err("no place").contains(full));
    assert!(step(5, Some(1.0), vec![rows(2, 39)]).is_ok());
    engine.settle(STREAM).expect("a step that works");
    finish(engine);
    assert_stepped(&mut all, &mut expected, "a budget");
}
