use super::*;

#[test]
fn a_full_pool_preempts_and_resumes_with_the_same_output() {
    let run = |pages: usize| {
        let rig = Setup { pages, ..Setup::default() }.start();
        let streams: Vec<RequestStream> = (0..6)
            .map(|i| {
                let sampling = SamplingParams {
                    seed: Some(40 + i64::from(i)),
                    repetition_penalty: 1.3,
                    max_new_tokens: Some(60),
                    ..SamplingParams::default()
                };
                rig.submit(Request::new(format!("r{i}"), prompt(i, 20), sampling))
            })
            .collect();
        let completions: Vec<Completion> = streams.into_iter().map(|s| s.blocking_collect().remove(0)).collect();
        let logits: Vec<_> = (0..6).map(|i| rig.logits_of(&format!("r{i}"))).collect();
        let preempted = rig.handle.stats().preempted_total;
        rig.assert_idle();
        (completions, logits, preempted)
    };
    let (roomy, roomy_logits, none) = run(256);
    assert_eq!(none, 0);
    // 6 requests of 80 tokens need 120 pages.
    let (tight, tight_logits, some) = run(45);
    assert!(some > 0, "the pool was never full");
    assert_eq!(tight.iter().map(|c| u64::from(c.preemptions)).sum::<u64>(), some);
    for (a, b) in roomy.iter().zip(&tight) {
        assert_eq!(a.token_ids, b.token_ids);
        assert_eq!(a.text, b.text);
        assert_eq!(a.usage, b.usage);
    }
    assert_eq!(roomy_logits, tight_logits);
}

#[test]
fn the_oldest_is_never_preempted() {
    let rig = Setup { pages: 30, ..Setup::default() }.start();
    let streams: Vec<RequestStream> =
        (0..5).map(|i| rig.submit(request(&format!("r{i}"), prompt(i, 16), 80))).collect();
    let completions: Vec<Completion> = streams.into_iter().map(|s| s.blocking_collect().remove(0)).collect();
    assert_eq!(completions[0].preemptions, 0);
    assert!(completions.iter().all(|c| c.token_ids.len() == 80));
    assert!(rig.handle.stats().preempted_total > 0);
    rig.assert_idle();
}

#[test]
fn a_request_that_fills_the_pool_alone_ends_by_length() {
    let rig = Setup { pages: 10, ..Setup::default() }.start();
    let params = SamplingParams { max_new_tokens: None, ..greedy(0) };
    let completion = rig.run(Request::new("a", prompt(1, 20), params));
    assert_eq!(completion.reason, FinishReason::Length { length: 20 });
    rig.assert_idle();
}

#[test]
fn prompts_too_long_are_refused_with_both_numbers() {
    let rig = Setup { pages: 10, context: 64, ..Setup::default() }.start();
    let refused = |len: usize| rig.handle.submit(request("a", prompt(1, len), 1)).err().unwrap().to_string();
    let context = refused(64);
    assert!(context.contains("64 tokens") && context.contains("length of 64"), "{context}");
    let pool = refused(40);
    assert!(pool.contains("40 tokens") && pool.contains("pool's 40"), "{pool}");
    assert_eq!(rig.run(request("b", prompt(1, 39), 1)).token_ids.len(), 1);
    rig.assert_idle();
}

#[test]
fn the_context_ends_a_generation() {
    let rig = Setup { context: 32, ..Setup::default() }.start();
    let completion = rig.run(request("a", prompt(1, 30), 100));
    assert_eq!(completion.reason, FinishReason::Length { length: 2 });
    rig.assert_idle();
}
