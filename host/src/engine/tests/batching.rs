use std::sync::atomic::Ordering;

use super::*;

#[test]
fn a_batch_gives_each_request_the_tokens_and_logits_it_gets_alone() {
    let lengths = [1usize, 3, 4, 5, 17, 40, 64, 90];
    let alone = Setup::default().start();
    let expected: Vec<Completion> =
        (0..8).map(|i| alone.run(request(&format!("r{i}"), prompt(i, lengths[i as usize]), 20))).collect();
    let together = Setup::default().start();
    let streams: Vec<RequestStream> =
        (0..8).map(|i| together.submit(request(&format!("r{i}"), prompt(i, lengths[i as usize]), 20))).collect();
    for (i, stream) in streams.into_iter().enumerate() {
        let found = stream.blocking_collect().remove(0);
        assert_eq!(found.token_ids, expected[i].token_ids);
        assert_eq!(found.text, expected[i].text);
        let id = format!("r{i}");
        let logits = together.logits_of(&id);
        assert_eq!(logits.len(), 20);
        assert_eq!(logits, alone.logits_of(&id));
    }
    assert!(together.log.most_sequences.load(Ordering::Relaxed) > 1, "nothing was batched");
    together.assert_idle();
}

#[test]
fn chunk_size_changes_nothing_and_bounds_the_prefill_of_a_step() {
    let mut outputs = Vec::new();
    for chunk in [1, 3, 16, 64, 512] {
        let rig = Setup { chunk, ..Setup::default() }.start();
        let streams: Vec<_> = (0..3).map(|i| rig.submit(request(&format!("r{i}"), prompt(i, 150), 8))).collect();
        let tokens: Vec<_> = streams.into_iter().map(|s| s.blocking_collect().remove(0).token_ids).collect();
        outputs.push((tokens, (0..3).map(|i| rig.logits_of(&format!("r{i}"))).collect::<Vec<_>>()));
        assert!(rig.log.most_prefill.load(Ordering::Relaxed) <= chunk);
        rig.assert_idle();
    }
    for other in &outputs[1..] {
        assert_eq!(other, &outputs[0]);
    }
}

#[test]
fn a_prefix_is_computed_once_and_the_last_token_always() {
    let rig = Setup::default().start();
    // An exact multiple of the page: all pages but the one with the last token are reused.
    let first = rig.run(request("a", prompt(1, 10 * PAGE), 4));
    assert_eq!(first.usage.cached_tokens(), 0);
    let computed = rig.log.tokens.load(Ordering::Relaxed);
    let second = rig.run(request("b", prompt(1, 10 * PAGE), 4));
    assert_eq!(second.token_ids, first.token_ids);
    assert_eq!(second.usage.cached_device as usize, 9 * PAGE);
    assert_eq!(rig.log.tokens.load(Ordering::Relaxed) - computed, PAGE + 3);
    assert_eq!(rig.logits_of("a"), rig.logits_of("b"));
    // The output of the first is in the tree as well.
    let mut longer = prompt(1, 10 * PAGE);
    longer.extend(&first.token_ids);
    let third = rig.run(request("c", longer, 1));
    assert_eq!(third.usage.cached_device as usize, 10 * PAGE);
    rig.assert_idle();
}

#[test]
fn salts_separate_prefixes() {
    let rig = Setup::default().start();
    let salted = |id: &str, salt: &str| Request { cache_salt: Some(salt.into()), ..request(id, prompt(1, 40), 2) };
    rig.run(salted("a", "x"));
    assert_eq!(rig.run(salted("b", "y")).usage.cached_tokens(), 0);
    assert_eq!(rig.run(request("c", prompt(1, 40), 2)).usage.cached_tokens(), 0);
    assert_eq!(rig.run(salted("d", "x")).usage.cached_tokens(), 36);
    rig.assert_idle();
}

/// A request under way, and when it was submitted.
type Timed = (RequestStream, Instant);

/// When the scheduler ended the request.
fn ended((stream, submitted): Timed) -> Instant {
    submitted + stream.blocking_collect().remove(0).elapsed
}

#[test]
fn decoding_goes_on_beside_a_long_prefill() {
    let delay = Duration::from_millis(2);
    let rig = Setup { chunk: 8, delay, ..Setup::default() }.start();
    let mut short = (rig.submit(request("short", prompt(1, 4), 40)), Instant::now());
    short.0.blocking_next();
    let long = (rig.submit(request("long", prompt(2, 400), 1)), Instant::now());
    // The long prompt takes 50 steps, the short one needs 40: it is not held up.
    assert!(ended(short) < ended(long));
    rig.assert_idle();
}

#[test]
fn higher_priority_is_served_first_and_equal_in_order_of_arrival() {
    let delay = Duration::from_millis(2);
    let rig = Setup { running: 1, delay, ..Setup::default() }.start();
    let mut blocker = rig.submit(request("blocker", prompt(9, 4), 100));
    blocker.blocking_next();
    let [low, low2, high] = [("low", 0), ("low2", 0), ("high", 5)].map(|(id, priority)| {
        let stream = rig.submit(Request { priority, ..request(id, prompt(3, 8), 3) });
        (stream, Instant::now())
    });
    blocker.blocking_collect();
    let (low, low2, high) = (ended(low), ended(low2), ended(high));
    assert!(high < low && low < low2);
    rig.assert_idle();
}

#[test]
fn requests_with_one_prompt_at_once_compute_it_once() {
    let delay = Duration::from_millis(1);
    let rig = Setup { chunk: 64, delay, ..Setup::default() }.start();
    let streams: Vec<RequestStream> =
        (0..8).map(|i| rig.submit(request(&format!("r{i}"), prompt(1, 301), 3))).collect();
    let completions: Vec<Completion> = streams.into_iter().map(|s| s.blocking_collect().remove(0)).collect();
    for completion in &completions[1..] {
        assert_eq!(completion.token_ids, completions[0].token_ids);
        assert_eq!(completion.usage.cached_device, 300);
    }
    // The prompt once, the last prompt token of the seven others, two decoded tokens each.
    assert_eq!(rig.log.tokens.load(Ordering::Relaxed), 301 + 7 + 8 * 2);
    rig.assert_idle();
}
