use super::*;

fn slow() -> Setup {
    Setup { delay: Duration::from_millis(2), ..Setup::default() }
}

fn abort_kind(completion: &Completion) -> AbortKind {
    match &completion.reason {
        FinishReason::Abort { kind, .. } => *kind,
        other => panic!("ended by {other:?}"),
    }
}

#[test]
fn a_dropped_stream_cancels_in_the_queue_in_prefill_and_in_decode() {
    let rig = Setup { running: 2, chunk: 4, ..slow() }.start();
    let mut decoding = rig.submit(request("decoding", prompt(1, 4), 400));
    decoding.blocking_next();
    let prefilling = rig.submit(request("prefilling", prompt(2, 400), 4));
    rig.wait_for("the second to run", |s| s.running == 2);
    let queued = rig.submit(request("queued", prompt(3, 40), 4));
    rig.wait_for("the third to wait", |s| s.queued == 1);
    drop(queued);
    rig.wait_for("the queued one to leave", |s| s.queued == 0);
    drop(prefilling);
    rig.wait_for("the prefilling one to leave", |s| s.running == 1);
    drop(decoding);
    rig.wait_for("the decoding one to leave", |s| s.running == 0);
    assert_eq!(rig.handle.stats().aborted_total, 3);
    rig.assert_idle();
}

#[test]
fn random_cancels_leak_nothing() {
    for host_pages in [0, 40] {
        cancel_at_random(host_pages);
    }
}

fn cancel_at_random(host_pages: u32) {
    let cache = CacheConfig { host_pages, ..CacheConfig::default() };
    let rig = Setup { pages: 60, running: 4, cache, ..Setup::default() }.start();
    for round in 0..40u32 {
        let mut streams: Vec<RequestStream> = (0..6)
            .map(|i| {
                let mut request = request(&format!("{round}-{i}"), prompt(i % 3, 30), 20);
                request.n = 1 + i % 2;
                rig.submit(request)
            })
            .collect();
        for (i, stream) in streams.iter_mut().enumerate() {
            for _ in 0..(round as usize * 7 + i * 5) % 11 {
                stream.blocking_next();
            }
        }
        if round % 3 == 0 {
            block_on(rig.handle.abort_all());
        }
        drop(streams);
        rig.wait_for("all to leave", |s| s.running + s.queued == 0);
        block_on(rig.handle.check_integrity()).unwrap();
    }
    rig.assert_idle();
}

#[test]
fn abort_by_id_keeps_what_was_generated() {
    let rig = slow().start();
    let mut stream = rig.submit(request("a", prompt(1, 20), 400));
    stream.blocking_next();
    assert!(!block_on(rig.handle.abort("b")));
    assert!(block_on(rig.handle.abort("a")));
    let completion = stream.blocking_collect().remove(0);
    assert_eq!(abort_kind(&completion), AbortKind::Requested);
    assert!(!block_on(rig.handle.abort("a")), "it has ended");
    // Its pages are still of use.
    assert_eq!(rig.run(request("c", prompt(1, 20), 1)).usage.cached_device, 16);
    rig.assert_idle();
}

#[test]
fn the_queue_is_bounded_and_advises_when_to_come_back() {
    let rig = Setup { running: 1, queued: 2, ..slow() }.start();
    let streams: Vec<RequestStream> = (0..3).map(|i| rig.submit(request(&format!("r{i}"), prompt(i, 4), 60))).collect();
    match rig.handle.submit(request("r3", prompt(3, 4), 1)) {
        Err(SubmitError::QueueFull { queued: 2, retry_after }) => {
            assert!(retry_after >= Duration::from_secs(1));
        }
        other => panic!("{:?}", other.err()),
    }
    assert_eq!(rig.handle.stats().rejected_total, 1);
    for stream in streams {
        assert_eq!(stream.blocking_collect()[0].token_ids.len(), 60);
    }
    rig.run(request("r3", prompt(3, 4), 1));
    rig.assert_idle();
}

#[test]
fn ids_are_unique_among_requests_in_flight() {
    let rig = slow().start();
    let stream = rig.submit(request("a", prompt(1, 4), 50));
    let again = rig.handle.submit(request("a", prompt(2, 4), 1)).err();
    assert_eq!(again, Some(SubmitError::DuplicateId("a".into())));
    stream.blocking_collect();
    rig.run(request("a", prompt(1, 4), 1));
    rig.assert_idle();
}

#[test]
fn bad_requests_are_refused() {
    let rig = Setup::default().start();
    let refused = |request: Request| rig.handle.submit(request).err().unwrap().to_string();
    assert!(refused(request("a", vec![], 1)).contains("at least one"));
    assert!(refused(request("a", vec![1, 99], 1)).contains("token 99 at position 1"));
    assert!(refused(Request { n: 0, ..request("a", vec![1], 1) }).starts_with("n: 0"));
    assert!(refused(Request { n: 1000, ..request("a", vec![1], 1) }).starts_with("n: 1000"));
    let mut many = request("a", vec![1], 1);
    many.logprobs.token_ids = vec![64];
    assert!(refused(many).contains("token 64"));
    rig.assert_idle();
}

#[test]
fn a_failed_pass_fails_its_requests_only() {
    let rig = Setup::default().start();
    for (id, token, message) in [
        ("fails", fake::FAILS, "told to fail"),
        ("panics", fake::PANICS, "told to panic"),
        ("nan", fake::NOT_A_NUMBER, "no number"),
    ] {
        let mut tokens = prompt(1, 12);
        tokens.push(token);
        let completion = rig.run(request(id, tokens, 5));
        assert_eq!(abort_kind(&completion), AbortKind::Internal);
        let FinishReason::Abort { message: found, .. } = completion.reason else { unreachable!() };
        assert!(found.contains(message), "{found}");
        let again = rig.run(request("again", prompt(1, 12), 1));
        assert_eq!(again.usage.cached_tokens(), 0, "its pages are not to be trusted");
        rig.flush();
        block_on(rig.handle.check_integrity()).unwrap();
        assert_eq!(rig.run(request("after", prompt(2, 12), 5)).token_ids.len(), 5);
    }
    assert_eq!(rig.handle.stats().failed_steps_total, 2);
    rig.assert_idle();
}

#[test]
fn samples_share_the_prompt_and_differ_by_seed() {
    let rig = Setup::default().start();
    let sampling = SamplingParams { seed: Some(5), max_new_tokens: Some(12), ..Default::default() };
    let several = Request { n: 3, ..Request::new("n", prompt(1, 41), sampling.clone()) };
    let completions = rig.submit(several).blocking_collect();
    assert_eq!(completions.iter().map(|c| c.index).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(completions[0].usage.cached_tokens(), 0);
    assert_eq!(completions[1].usage.cached_device, 40);
    assert_eq!(completions[2].usage.cached_device, 40);
    for (completion, seed) in completions.iter().zip(5..) {
        let sampling = SamplingParams { seed: Some(seed), ..sampling.clone() };
        let alone = rig.run(Request::new(format!("alone {seed}"), prompt(1, 41), sampling));
        assert_eq!(alone.token_ids, completion.token_ids);
    }
    assert_ne!(completions[0].token_ids, completions[1].token_ids);
    rig.assert_idle();
}

#[test]
fn cancelling_several_samples_frees_all_of_them() {
    let rig = slow().start();
    let mut stream = rig.submit(Request { n: 4, ..request("n", prompt(1, 30), 200) });
    stream.blocking_next();
    drop(stream);
    rig.wait_for("all to leave", |s| s.running + s.queued == 0);
    assert_eq!(rig.handle.stats().aborted_total, 4);
    rig.assert_idle();
}

#[test]
fn a_broken_scheduler_tells_its_clients_and_takes_no_more() {
    let mut setup = slow();
    setup.broken_tap = true;
    let rig = setup.start();
    let completions = rig.submit(Request { n: 2, ..request("a", prompt(1, 9), 5) }).blocking_collect();
    assert_eq!(completions.len(), 2);
    for completion in &completions {
        assert_eq!(abort_kind(completion), AbortKind::Internal);
    }
    rig.wait_for("the thread to end", |_| !rig.handle.is_alive());
    let refused = rig.handle.submit(request("b", prompt(1, 9), 5)).err();
    assert_eq!(refused, Some(SubmitError::ShuttingDown));
}

#[test]
fn usage_and_counters_add_up() {
    let rig = Setup::default().start();
    rig.run(request("a", prompt(1, 30), 7));
    let second = rig.run(request("b", prompt(1, 30), 5));
    assert_eq!(second.usage.prompt_tokens, 30);
    assert_eq!(second.usage.completion_tokens, 5);
    let stats = rig.handle.stats();
    assert_eq!(stats.requests_total, 2);
    assert_eq!(stats.prompt_tokens_total, 60);
    assert_eq!(stats.generation_tokens_total, 12);
    assert_eq!(stats.cached_device_total, 28);
    assert_eq!(stats.time_to_first_token.count, 2);
    assert_eq!(stats.inter_token_latency.count, 10);
    assert_eq!(stats.e2e_latency.count, 2);
    assert_eq!(stats.queue_time.count, 2);
    rig.assert_idle();
}
