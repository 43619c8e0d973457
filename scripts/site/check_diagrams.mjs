// Parse the mermaid diagrams of Markdown pages: node check_diagrams.mjs MERMAID.JS PAGE...
// Prints page, line and mermaid's message of each diagram with a syntax error, and then ends with 1.
import { readFileSync } from "node:fs";
import { runInThisContext } from "node:vm";

const [script, ...pages] = process.argv.slice(2);
// The bundle expects a browser. Its sanitizer returns texts as they are where the document is as incomplete as this one.
globalThis.window = globalThis;
globalThis.addEventListener = () => {};
globalThis.document = { nodeType: 9, createElement: () => ({}) };
globalThis.Element = class {};
runInThisContext(readFileSync(script, "utf8"), { filename: script });

for (const page of pages) {
  const text = readFileSync(page, "utf8");
  for (const diagram of text.matchAll(/^```mermaid\n(.*?)^```$/gms)) {
    try {
      await mermaid.parse(diagram[1]);
    } catch (error) {
      const line = text.slice(0, diagram.index).split("\n").length;
      console.error(`docs: ${page}:${line}: mermaid cannot parse this diagram: ${error.message}`);
      process.exitCode = 1;
    }
  }
}
