// Deploycheck judges the deployment files with the code of the programs that will read them.
//
//	deploycheck manifests <rendered.yaml    as an API server would: strict types, defaults, validation, the restricted pod standard
//	deploycheck compose FILE                as docker compose would load it, with every profile
//	deploycheck dockerfile FILE             as docker build --check would
//
// It prints what is wrong, a line each, and ends with 1 if there was anything.
package main

import (
	"fmt"
	"os"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: deploycheck manifests | compose FILE | dockerfile FILE")
		os.Exit(2)
	}
	var wrong []string
	switch command, files := os.Args[1], os.Args[2:]; {
	case command == "manifests" && len(files) == 0:
		wrong = manifests(os.Stdin)
	case command == "compose" && len(files) == 1:
		wrong = compose(files[0])
	case command == "dockerfile" && len(files) == 1:
		wrong = dockerfile(files[0])
	default:
		wrong = []string{fmt.Sprintf("not a command: %v", os.Args[1:])}
	}
	for _, line := range wrong {
		fmt.Println(line)
	}
	if len(wrong) > 0 {
		os.Exit(1)
	}
}
