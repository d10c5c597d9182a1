// llama.cpp as a peer of the benchmarks: reads a JSON command a line, answers a JSON object a line.
//
//   node llama.mjs PEERS_FOLDER MODEL THREADS
//
// {"op": "prefill", "tokens": [ids]}                      -> {"seconds": s}
//     seconds to the first token of a prompt that is not cached
// {"op": "first", "tokens": [ids]}                        -> {"seconds": s}
//     the same, making the context included
// {"op": "begin", "prompts": [[ids], ..], "most": n}      -> {}
//     computes the prompts side by side; up to n tokens may follow each
// {"op": "more", "before": m, "steps": n}                 -> {"seconds": s, "tokens": n}
//     m tokens after each of the prompts, and then n that are timed, all prompts side by side
// {"op": "end"}                                           -> {}
// {"op": "save", "tokens": [ids], "file": path}           -> {"bytes": n}
// {"op": "restore", "tokens": [ids], "file": path, "last": id} -> {"seconds": s}
//     seconds to load a saved state and to compute the first token after one more prompt token
//
// The first line that it says is {"ready": true, "seconds": s}, with the time that loading took. A command that fails answers
// {"error": text}.

import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const [peers, modelPath, threads] = process.argv.slice(2);
const entry = path.join(peers, "node_modules", "node-llama-cpp", "dist", "index.js");
const {getLlama} = await import(pathToFileURL(entry).href);

const count = Number(threads);
const seconds = (since) => Number(process.hrtime.bigint() - since) / 1e9;
const loadingSince = process.hrtime.bigint();
const llama = await getLlama({gpu: false, build: "never", maxThreads: count, logLevel: "error", progressLogs: false});
const model = await llama.loadModel({modelPath, gpuLayers: 0});
const loading = seconds(loadingSince);
const greedy = {temperature: 0, yieldEogToken: true};

/** A context of its own for `prompts.length` sequences, each with room for `extra` more tokens. */
async function makeContext(prompts, extra) {
    const longest = Math.max(...prompts.map((prompt) => prompt.length));
    return await model.createContext({
        sequences: prompts.length,
        contextSize: longest + extra,
        batchSize: 512,
        threads: {ideal: count, min: count},
        ignoreMemorySafetyChecks: true
    });
}

const sequencesOf = (context, prompts) =>
    prompts.map(() => context.getSequence({checkpoints: {max: 0, interval: false}}));

async function withSequences(prompts, extra, work) {
    const context = await makeContext(prompts, extra);
    try {
        return await work(sequencesOf(context, prompts));
    } finally {
        await context.dispose();
    }
}

async function firstToken(sequence, tokens) {
    for await (const token of sequence.evaluate(tokens, greedy))
        return token;
    throw new Error("the model generated nothing");
}

/** What `begin` began. */
let open;

const operations = {
    async prefill({tokens}) {
        return await withSequences([tokens], 64, async ([sequence]) => {
            const start = process.hrtime.bigint();
            await firstToken(sequence, tokens);
            return {seconds: seconds(start)};
        });
    },

    async first({tokens}) {
        const start = process.hrtime.bigint();
        return await withSequences([tokens], 64, async ([sequence]) => {
            await firstToken(sequence, tokens);
            return {seconds: seconds(start)};
        });
    },

    async begin({prompts, most}) {
        const context = await makeContext(prompts, most + 64);
        const sequences = sequencesOf(context, prompts);
        // Every sequence is past its prompt, and has made one token, before the clock starts.
        const tokens = await Promise.all(sequences.map((sequence, index) => firstToken(sequence, prompts[index])));
        open = {context, sequences, tokens, ends: sequences.map((sequence) => sequence.nextTokenIndex)};
        return {};
    },

    async more({before, steps}) {
        const {sequences, tokens, ends} = open;
        // Steady decoding is measured: the steps before the clock starts bring the weights back into the last cache, which others used.
        // What was made after the prompts the last time goes, so that contexts do not grow from one call to the next.
        for (const [index, sequence] of sequences.entries())
            await sequence.eraseContextTokenRanges([{start: ends[index], end: sequence.nextTokenIndex}]);
        const generators = sequences.map((sequence, index) => sequence.evaluate([tokens[index]], greedy));
        const run = (count) => Promise.all(generators.map(async (generator) => {
            for (let step = 0; step < count; step++)
                if ((await generator.next()).done)
                    throw new Error(`the model ended after ${step} of ${count} tokens`);
        }));
        await run(before);
        const start = process.hrtime.bigint();
        await run(steps);
        const took = seconds(start);
        await Promise.all(generators.map((generator) => generator.return()));
        return {seconds: took, tokens: steps * sequences.length};
    },

    async end() {
        await open.context.dispose();
        open = undefined;
        return {};
    },

    async save({tokens, file}) {
        return await withSequences([tokens], 64, async ([sequence]) => {
            await sequence.evaluateWithoutGeneratingNewTokens(tokens);
            const {fileSize} = await sequence.saveStateToFile(file);
            return {bytes: fileSize};
        });
    },

    async restore({tokens, file, last}) {
        return await withSequences([tokens], 64, async ([sequence]) => {
            const start = process.hrtime.bigint();
            await sequence.loadStateFromFile(file, {acceptRisk: true});
            await firstToken(sequence, [last]);
            return {seconds: seconds(start)};
        });
    }
};

console.log(JSON.stringify({ready: true, seconds: loading}));
for await (const line of readline.createInterface({input: process.stdin})) {
    let answer;
    try {
        const command = JSON.parse(line);
        const operation = operations[command.op];
        if (operation === undefined)
            throw new Error(`unknown operation ${command.op}`);
        answer = await operation(command);
    } catch (error) {
        answer = {error: String(error?.message ?? error)};
    }
    console.log(JSON.stringify(answer));
}
await llama.dispose();
