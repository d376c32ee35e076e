package main

import (
	"context"
	"fmt"
	"os"

	"github.com/moby/buildkit/client/llb"
	"github.com/moby/buildkit/client/llb/sourceresolver"
	"github.com/moby/buildkit/frontend/dockerfile/dockerfile2llb"
	"github.com/moby/buildkit/frontend/dockerui"
	"github.com/opencontainers/go-digest"
)

// dockerfile applies the rules of docker build --check, without asking a registry about base images.
func dockerfile(file string) []string {
	content, err := os.ReadFile(file)
	if err != nil {
		return []string{err.Error()}
	}
	source := llb.NewSourceMap(nil, file, "Dockerfile", content)
	source.Definition = &llb.Definition{} // the file came from nowhere that buildkit knows
	found, err := dockerfile2llb.DockerfileLint(context.Background(), content, dockerfile2llb.ConvertOpt{
		Config:       dockerui.Config{},
		SourceMap:    source,
		MetaResolver: noRegistry{},
	})
	if err != nil {
		return []string{err.Error()}
	}
	var wrong []string
	if found.Error != nil {
		wrong = append(wrong, fmt.Sprintf("%s: %s", file, found.Error.Message))
	}
	for _, warning := range found.Warnings {
		wrong = append(wrong, fmt.Sprintf("%s: %s: %s", file, warning.RuleName, warning.Detail))
	}
	return wrong
}

// noRegistry answers that a base image has no settings of its own.
type noRegistry struct{}

func (noRegistry) ResolveImageConfig(
	_ context.Context, ref string, _ sourceresolver.Opt,
) (string, digest.Digest, []byte, error) {
	return ref, "", []byte(`{"architecture": "amd64", "os": "linux"}`), nil
}
